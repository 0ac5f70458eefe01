"""Conversations with tools: `LLM.chat`, and templates that know no tools."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from typing import Any

import pytest
from support.answer_forms import allowed
from support.chat_templates import STRICT_TURNS, speaker, text_interface
from support.example_tools import ADD, WEATHER
from support.in_process_server import served

from radixkv import LLM, AsyncLLM, Chat, SamplingParams, StructuredOutputsParams
from radixkv.outputs import RequestOutput
from radixkv.prompts import ChatOptions, render_chat
from radixkv.tools.definitions import as_tool_options
from radixkv.tools.pieces import AnswerPiece, ParsedAnswer, ToolCallArguments

QUESTIONS = [f"What is the weather in {city}?" for city in ("Paris", "Rome", "Oslo", "Lima", "Cairo")]
QUESTIONS += [f"What is {a} plus {b}?" for a, b in ((3, 4), (10, 5), (7, 70))]


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_of_several_tools_only_some_may_be_called(llm: LLM) -> None:
    params = SamplingParams(n=4, temperature=1.5, seed=1, max_tokens=60)
    question, tools = ask("What is the weather in Paris?"), [WEATHER, ADD]
    # Of this one, only the prompt is looked at.
    (any_of_them,) = llm.chat(question, SamplingParams(max_tokens=1), False, tools=tools, tool_choice="required")
    for name in ("add", "get_weather"):
        (one,) = llm.chat(question, params, False, tools=tools, tool_choice=allowed(name))
        assert one.prompt_token_ids == any_of_them.prompt_token_ids
        answers = [part.answer for part in one.outputs if part.answer is not None and part.finish_reason == "stop"]
        assert {call.name for answer in answers for call in answer.tool_calls} == {name}
    (text,) = llm.chat(question, params, False, tools=tools, tool_choice=allowed("add", mode="auto"))
    assert text.prompt_token_ids == any_of_them.prompt_token_ids
    assert not any(part.answer.tool_calls for part in text.outputs if part.answer is not None)


def is_valid(name: str, arguments: str) -> bool:
    values = json.loads(arguments)
    if name == "get_weather":
        return (
            set(values) == {"city", "unit"}
            and len(values["city"]) <= 20
            and values["unit"] in ("celsius", "fahrenheit")
        )
    return name == "add" and set(values) == {"a", "b"} and all(0 <= number <= 999 for number in values.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "n", [4, pytest.param(25, marks=pytest.mark.nightly)], ids=lambda n: f"{n * len(QUESTIONS)}-calls"
)
def test_all_calls_are_valid_even_of_a_small_model_at_a_high_temperature(llm: LLM, n: int) -> None:
    params = SamplingParams(n=n, temperature=1.5, seed=1, max_tokens=60)
    outputs = llm.chat(
        [ask(question) for question in QUESTIONS],
        params,
        use_tqdm=False,
        tools=[WEATHER, ADD],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    parts = list(itertools.chain.from_iterable(output.outputs for output in outputs))
    calls = [call for part in parts if part.answer for call in part.answer.tool_calls]
    assert len(parts) == len(calls) == n * len(QUESTIONS)
    assert all(is_valid(call.name, call.arguments) for call in calls)
    assert {part.finish_reason for part in parts} == {"stop"}
    assert {call.name for call in calls} == {"get_weather", "add"}
    assert not any(part.answer.text for part in parts if part.answer)


def test_the_model_chooses_the_right_tool_and_reads_its_result(default_llm: LLM) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=60)
    messages: list[Any] = ask("What is 3 plus 4?")
    options: Any = {"tools": [WEATHER, ADD], "parallel_tool_calls": False, "use_tqdm": False}
    (first,) = default_llm.chat(messages, greedy, tool_choice="required", **options)
    answer = first.outputs[0].answer
    assert answer is not None
    (call,) = answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3, "b": 4})
    messages += [answer.as_message(), {"role": "tool", "tool_call_id": call.id, "content": "7"}]
    (second,) = default_llm.chat(messages, greedy, **options)
    # The tools, the question and the call are in the cache.
    assert second.num_cached_tokens >= len(first.prompt_token_ids)
    assert second.outputs[0].answer is not None
    assert "7" in second.outputs[0].answer.text
    assert second.outputs[0].answer.tool_calls == []


def test_tools_may_be_described_and_not_called(llm: LLM) -> None:
    (output,) = llm.chat(
        ask("Hi"), SamplingParams(temperature=0.0, max_tokens=4), False, tools=[ADD], tool_choice="none"
    )
    (without,) = llm.chat(ask("Hi"), SamplingParams(temperature=0.0, max_tokens=4), False)
    assert len(output.prompt_token_ids) > len(without.prompt_token_ids)
    assert without.outputs[0].answer is not None
    assert without.outputs[0].answer.text == without.outputs[0].text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tools": "add"}, "tools: expected a list"),
        ({"tools": [{"name": "add"}]}, "tools: expected {'type': 'function'"),
        ({"tools": [ADD, ADD]}, "tools: expected different names, got 'add' twice"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
            "to be an object",
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]},
            "tools: expected properties of the parameters of 'f' to be an object, got 5",
        ),
        ({"tools": [ADD], "tool_choice": "always"}, "required, a function, as {'type': 'function', 'fun"),
        ({"tools": [ADD], "tool_choice": allowed("sub")}, "tool_choice: there is no tool 'sub', only add"),
        ({"tools": [ADD], "tool_choice": allowed("")}, "tool_choice: there is no tool '', only add"),
        ({"tools": [ADD], "tool_choice": allowed()}, "tool_choice: expected a mode, auto or required, and functions"),
        (
            {"tools": [ADD], "tool_choice": allowed("add", mode="none")},
            "tool_choice: expected a mode, auto or required",
        ),
        (
            {"tools": [ADD], "tool_choice": {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [5]}}},
            "tool_choice: expected a mode, auto or required, and functions",
        ),
        ({"tool_choice": allowed("add")}, "needs tools, and there are none"),
        ({"tool_choice": "required"}, "tool_choice: 'required' needs tools"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}},
            "tool_choice: there is no tool 'sub'",
        ),
        ({"chat_template_kwargs": {"chat_template": "x"}}, "chat_template_kwargs: 'chat_template' is not a variable"),
        ({"chat_template_kwargs": {"self": "x"}}, "chat_template_kwargs: 'self' is not a variable"),
    ],
)
def test_impossible_tools_are_refused(llm: LLM, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        llm.chat(ask("Hi"), SamplingParams(max_tokens=1), False, **options)


@pytest.mark.parametrize("tool_choice", ["auto", "none"])
def test_tokens_that_are_allowed_are_refused_by_their_name_beside_tools(llm: LLM, tool_choice: str) -> None:
    """They were refused together with structured outputs, which nobody had asked for."""
    params, num_steps = SamplingParams(allowed_token_ids=[5, 6]), llm.engine.num_steps
    message = "allowed_token_ids: expected none together with tools, for which answers have a grammar, got \\[5, 6\\]"
    with pytest.raises(ValueError, match=message):
        llm.chat(ask("What is 3 plus 4?"), params, use_tqdm=False, tools=[ADD], tool_choice=tool_choice)
    assert llm.engine.num_steps == num_steps


def test_a_strict_tool_is_enforced_whole_or_refused(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"xs": {"type": "array", "uniqueItems": True, "maxItems": 2}},
        "required": ["xs"],
    }
    for strict in (False, True):
        tool = {"type": "function", "function": {"name": "f", "parameters": schema, "strict": strict}}
        options: Any = {"tools": [tool], "tool_choice": "required", "use_tqdm": False}
        if strict:
            with pytest.raises(ValueError, match=r"tools: .*uniqueItems"):
                llm.chat(ask("Hi"), SamplingParams(max_tokens=1), **options)
        else:
            llm.chat(ask("Hi"), SamplingParams(max_tokens=1), **options)


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^(?!x).*$"},  # as zod writes that of an address
        {"type": "any"},
        {"$ref": "https://example.com/schema.json"},
        {"$ref": "#/$defs/missing"},
    ],
)
def test_a_schema_that_cannot_be_compiled_makes_no_other_tool_unusable(
    llm: LLM, schema: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """One such tool had every request refused, by an error that did not say which tool it was."""

    def options(strict: bool) -> Any:
        parameters = {"type": "object", "properties": {"address": schema}, "required": ["address"]}
        tool = {"type": "function", "function": {"name": "send_mail", "parameters": parameters, "strict": strict}}
        return {"tools": [ADD, tool], "tool_choice": "required", "use_tqdm": False}

    with pytest.raises(ValueError, match="tools: the parameters of 'send_mail' cannot be enforced: "):
        llm.chat(ask("What is 3 plus 4?"), SamplingParams(max_tokens=1), **options(strict=True))
    assert not caplog.messages
    params = SamplingParams(temperature=0.0, max_tokens=60)
    (output,) = llm.chat(ask("What is 3 plus 4?"), params, **options(strict=False))
    answer = output.outputs[0].answer
    assert answer is not None
    assert answer.tool_calls[0].name in ("add", "send_mail")
    (message,) = caplog.messages
    assert message.startswith("the parameters of 'send_mail' cannot be enforced: ")


@pytest.mark.parametrize("strict", [False, True])
def test_a_schema_that_takes_too_much_work_is_found_before_a_call_reaches_it(
    llm: LLM, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """The answer failed in the middle of the call, by an error that named no tool."""
    parameters = {"properties": {"a": {"type": "string", "pattern": "a?" * 4000 + "a" * 100}}, "required": ["a"]}
    tool = {"type": "function", "function": {"name": "send_mail", "parameters": parameters, "strict": strict}}
    chat_format = llm.engine.loaded.chat_format
    assert chat_format is not None
    form = chat_format.answer_form("", as_tool_options([ADD, tool], "required", None))
    assert form is not None
    spec = StructuredOutputsParams(frame=form.frame(content_is_constrained=False))
    message = "the parameters of 'send_mail' cannot be enforced: its regular expressions take too much work to compile"
    if strict:
        with pytest.raises(ValueError, match=f"^tools: {message}"):
            llm.engine.grammars.compile(spec)
    else:
        state = llm.engine.grammars.compile(spec)
        assert caplog.messages[0].startswith(message)
        text = '{"name": "send_mail", "arguments": {"a": "b"'
        token_ids = llm.get_tokenizer()(text, add_special_tokens=False)["input_ids"]
        assert state.num_before_end(token_ids) == len(token_ids)


def test_a_streamed_answer_comes_in_its_parts(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=1.0, seed=1, max_tokens=60)
    pieces: dict[int, list[AnswerPiece]] = {0: [], 1: []}
    answers = {}
    options: Any = {"tools": [WEATHER, ADD], "tool_choice": "required"}
    for output in llm.stream(ask("What is 3 plus 4?"), params, **options):
        for part in output.outputs:
            pieces[part.index] += part.pieces or []
            if part.answer is not None:
                answers[part.index] = part.answer
    for index in (0, 1):
        assert answers[index].tool_calls
        assert ParsedAnswer.of(pieces[index]) == answers[index]
        assert sum(isinstance(piece, ToolCallArguments) for piece in pieces[index]) > 2
    (whole,) = llm.chat(ask("What is 3 plus 4?"), params, False, **options)
    # Ids are made anew for each answer.
    for part in whole.outputs:
        assert part.answer is not None
        assert [(call.name, call.arguments) for call in part.answer.tool_calls] == [
            (call.name, call.arguments) for call in answers[part.index].tool_calls
        ]
    with pytest.raises(ValueError, match="expected a conversation, got a prompt"):
        llm.stream("What", tools=[ADD])


def test_without_text_there_is_no_answer_to_read(llm: LLM) -> None:
    """It had an answer as if nothing had been said or called."""
    params = SamplingParams(temperature=0.0, max_tokens=60, detokenize=False)
    question, options = ask("What is 3 plus 4?"), {"tools": [ADD], "tool_choice": "required"}
    (whole,) = llm.chat(question, params, use_tqdm=False, **options)
    streamed = list(llm.stream(question, params, **options))

    async def main() -> list[RequestOutput]:
        async with AsyncLLM(llm) as engine:
            return [output async for output in engine.chat(question, params, **options)]

    for outputs in ([whole], streamed, asyncio.run(main())):
        parts = [output.outputs[0] for output in outputs]
        assert [token for part in parts for token in part.token_ids] == whole.outputs[0].token_ids
        assert all((part.text, part.answer, part.pieces) == ("", None, None) for part in parts)


def test_a_chat_calls_a_tool_and_goes_on_with_its_result(default_llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=60)
    chat = Chat(default_llm, sampling_params=params, tools=[WEATHER, ADD], parallel_tool_calls=False)
    with pytest.raises(
        ValueError, match="results: expected those of calls, which the last answer does not have, got \\[\\]"
    ):
        chat.send_results({})
    assert chat.send("What is 3 plus 4?", tool_choice="required") == ""
    assert chat.answer is not None
    (call,) = chat.answer.tool_calls
    assert (call.name, json.loads(call.arguments)) == ("add", {"a": 3, "b": 4})
    with pytest.raises(ValueError, match="send_results\\(\\) comes first"):
        chat.send("And?")
    with pytest.raises(ValueError, match="results: expected one for each"):
        chat.send_results({"other": "7"})
    with pytest.raises(TypeError, match="results: expected strings, got 7"):
        chat.send_results({call.id: 7})  # type: ignore[dict-item]
    other = chat.fork()
    text = chat.send_results({call.id: "7"})
    assert "7" in text
    assert other.send_results({call.id: "7"}) == text
    assert [message["role"] for message in chat.history] == ["user", "assistant", "tool", "assistant"]
    assert chat.history[1]["tool_calls"][0]["id"] == call.id
    assert chat.last_output is not None
    assert chat.last_output.num_cached_tokens > 200  # the tools, and what was said
    with pytest.raises(ValueError, match="tool_choice: expected none, auto"):
        chat.stream("Hi", tool_choice="sometimes")
    with pytest.raises(ValueError, match="tools: expected a list"):
        Chat(default_llm, tools="add")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", sorted(STRICT_TURNS))
async def test_where_turns_are_insisted_on_an_answer_s_results_and_the_next_question_are_one(name: str) -> None:
    llm = speaker(STRICT_TURNS[name], max_position_embeddings=2048)
    call = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}}
    chat = [
        *ask("What is 3 plus 4?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "assistant", "content": "Wait."},
        {"role": "tool", "tool_call_id": "c", "content": "7"},
        {"role": "user", "content": "In words?"},
    ]
    use = {"type": "tool_use", "id": "c", "name": "add", "input": {"a": 3, "b": 4}}
    result = {"type": "tool_result", "tool_use_id": "c", "content": "7"}
    messages = [
        *ask("What is 3 plus 4?"),
        {"role": "assistant", "content": [use, {"type": "text", "text": "Wait."}]},
        {"role": "user", "content": [result, {"type": "text", "text": "In words?"}]},
    ]
    items = [
        *ask("What is 3 plus 4?"),
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": '{"a": 3, "b": 4}'},
        {"role": "assistant", "content": "Wait."},
        {"type": "function_call_output", "call_id": "c", "output": "7"},
        {"role": "user", "content": "In words?"},
    ]
    function = ADD["function"]
    anthropic_tool = {
        **{name: function[name] for name in ("name", "description")},
        "input_schema": function["parameters"],
    }
    async with served(llm) as client:
        answers = {}
        for path, body in {
            "chat/completions": {"messages": chat, "tools": [ADD], "max_tokens": 2, "return_token_ids": True},
            "messages": {"model": "model", "messages": messages, "tools": [anthropic_tool], "max_tokens": 2},
            "responses": {"input": items, "tools": [{"type": "function", **function}], "max_output_tokens": 2},
        }.items():
            response = await client.post(f"/v1/{path}", json=body)
            assert response.status_code == 200, response.text
            answers[path] = response.json()
        prompt = llm.get_tokenizer().decode(answers["chat/completions"]["prompt_token_ids"])
        first, question, answer, results, end = prompt.split("<|im_start|>")
        assert (first, end) == ("", "model\n")
        assert question.startswith("user\n")
        assert "You can call these functions:\n" in question
        assert "What is 3 plus 4?" in question
        assert answer == 'assistant\n{"name": "add", "arguments": {"a": 3, "b": 4}}\nWait.<|im_end|>\n'
        assert results == "user\nThe function returned: 7\nIn words?<|im_end|>\n"
        num_tokens = answers["chat/completions"]["usage"]["prompt_tokens"]
        assert answers["responses"]["usage"]["input_tokens"] == num_tokens
        usage = answers["messages"]["usage"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == num_tokens


_ONLY_FIRST = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
)


@pytest.mark.parametrize("template", [_ONLY_FIRST, STRICT_TURNS["gemma3"]], ids=["qwen3.5", "gemma3"])
def test_a_later_system_message_is_the_user_s_where_the_template_refuses_it(template: str) -> None:
    """Claude Code sends one after the first question, and got 400 with every request."""
    loaded = text_interface(template)
    system, later = ({"role": "system", "content": text} for text in ("Be brief.", "Be kind."))
    answer = {"role": "assistant", "content": "Hello"}
    chat = [system, *ask("Hi"), later, answer, later, *ask("Go on"), *ask("now")]
    joined = [system, *ask("Hi\n\nBe kind."), answer, *ask("Be kind.\n\nGo on\n\nnow")]
    assert render_chat(chat, loaded) == render_chat(joined, loaded)


def test_a_later_system_message_stays_one_where_the_template_writes_it(llm: LLM) -> None:
    later = {"role": "system", "content": "Be kind."}
    assert "<|im_start|>system\nBe kind.<|im_end|>" in render_chat([*ask("Hi"), later], llm.engine.loaded)


def test_where_there_is_no_system_message_the_first_question_describes_tools() -> None:
    options = ChatOptions(tools=as_tool_options([ADD], None, None))
    of_gemma2, of_gemma3 = (text_interface(STRICT_TURNS[name]) for name in ("gemma2", "gemma3"))
    prompt = render_chat(ask("Hi"), of_gemma2, options)
    assert prompt == render_chat(ask("Hi"), of_gemma3, options)
    assert prompt.endswith("answer in plain words.\n\nHi<|im_end|>\n<|im_start|>model\n")
    begun = render_chat([{"role": "assistant", "content": "Well?"}, *ask("Hi")], of_gemma2, options)
    assert begun.startswith("<|im_start|>user\nYou can call these functions:")
    assert begun.endswith("<|im_start|>assistant\nWell?<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>model\n")
    # A system message of the client's own is still refused.
    with pytest.raises(ValueError, match="System role not supported"):
        render_chat([{"role": "system", "content": "Be brief."}, *ask("Hi")], of_gemma2, options)
