"""Tools and thinking in `/v1/chat/completions`, through the `openai` client."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest
from support.example_tools import ADD, WEATHER
from support.server_process import MODEL

QUESTION = [{"role": "user", "content": "What is 3 plus 4?"}]
NAMED = {"type": "function", "function": {"name": "add"}}


def chat(client: openai.OpenAI, messages: Any = QUESTION, **options: Any) -> Any:
    defaults = {"model": MODEL, "temperature": 0, "max_completion_tokens": 50, "tools": [WEATHER, ADD]}
    return client.chat.completions.create(**{**defaults, "messages": messages, **options})


def test_an_agent_s_loop(default_client: openai.OpenAI) -> None:
    first = chat(default_client, tool_choice="required", parallel_tool_calls=False)
    (choice,) = first.choices
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "add", {"a": 3, "b": 4})
    result = {"role": "tool", "tool_call_id": call.id, "content": "7"}
    second = chat(default_client, [*QUESTION, choice.message, result])
    assert second.choices[0].finish_reason == "stop"
    assert "7" in second.choices[0].message.content
    assert second.choices[0].message.tool_calls is None
    # The tools, the question and the call were computed before.
    assert second.usage.prompt_tokens_details.cached_tokens >= first.usage.prompt_tokens


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_stream_of_calls_equals_the_whole(client: openai.OpenAI, choice: Any) -> None:
    options = {"tool_choice": choice, "n": 2, "temperature": 1.0, "seed": 3}
    whole = chat(client, **options)
    chunks = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
    for index, expected in enumerate(whole.choices):
        parts = [chunk for chunk in chunks if chunk.index == index]
        deltas = [delta for part in parts for delta in part.delta.tool_calls or []]
        for number, call in enumerate(expected.message.tool_calls):
            first, *rest = [delta for delta in deltas if delta.index == number]
            assert (first.type, first.function.name, first.function.arguments) == ("function", call.function.name, "")
            assert first.id.startswith("call_")
            assert len(rest) > 1
            assert all(delta.id is None and delta.function.name is None for delta in rest)
            assert "".join(delta.function.arguments for delta in rest) == call.function.arguments
        assert max(delta.index for delta in deltas) == len(expected.message.tool_calls) - 1
        assert "".join(part.delta.content or "" for part in parts) == ""
        assert [part.finish_reason for part in parts][-1] == expected.finish_reason
    if choice is NAMED:
        assert {call.function.name for each in whole.choices for call in each.message.tool_calls} == {"add"}
        assert {each.finish_reason for each in whole.choices} == {"tool_calls"}


def test_only_some_tools_may_be_called(client: openai.OpenAI) -> None:
    some = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [NAMED]}}
    options = {"tool_choice": some, "n": 2, "temperature": 1.0, "seed": 3}
    for choice in chat(client, **options).choices:
        assert {call.function.name for call in choice.message.tool_calls} == {"add"}
    with pytest.raises(openai.BadRequestError, match="there is no tool 'get_weather', only add"):
        tool = {"type": "function", "function": {"name": "get_weather"}}
        other = {**some, "allowed_tools": {"mode": "auto", "tools": [tool]}}
        chat(client, tools=[ADD], tool_choice=other)


def test_text_beside_tools_is_text(client: openai.OpenAI) -> None:
    for choice in ("auto", "none"):
        hello = [{"role": "user", "content": "Say hello."}]
        answer = chat(client, hello, tool_choice=choice, max_completion_tokens=8).choices[0]
        assert answer.message.content
        assert answer.message.tool_calls is None
        chunks = chat(client, hello, tool_choice=choice, max_completion_tokens=8, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == answer.message.content


def test_what_the_answer_must_look_like_and_calls_are_alternatives(client: openai.OpenAI) -> None:
    constraint = {"structured_outputs": {"choice": ["perhaps", "never"]}}
    answer = chat(client, extra_body=constraint, max_completion_tokens=40).choices[0]
    assert answer.message.tool_calls or answer.message.content in ("perhaps", "never")
    forced = chat(client, tool_choice="none", extra_body=constraint).choices[0]
    assert forced.message.content in ("perhaps", "never")


def test_a_call_that_is_cut_off_has_the_finish_reason_length(client: openai.OpenAI) -> None:
    answer = chat(client, tool_choice=NAMED, max_completion_tokens=12).choices[0]
    assert answer.finish_reason == "length"
    assert answer.message.tool_calls[0].function.name == "add"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_the_syntax_of_a_required_call_that_is_cut_is_no_content(client: openai.OpenAI, choice: Any) -> None:
    options = {"tool_choice": choice, "parallel_tool_calls": False, "max_completion_tokens": 5}
    answer = chat(client, **options).choices[0]
    assert (answer.finish_reason, answer.message.content, answer.message.tool_calls) == ("length", None, None)
    chunks = [chunk.choices[0] for chunk in chat(client, **options, stream=True)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == ""
    assert chunks[-1].finish_reason == "length"


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["required", "named"])
def test_a_stop_string_does_not_cut_a_required_call(client: openai.OpenAI, choice: Any) -> None:
    """It used to be looked for in the names and arguments of calls, which then could not be executed."""
    options = {"tool_choice": choice, "parallel_tool_calls": False}
    whole = chat(client, **options).choices[0]
    for stop in ("name", '"b"', "}"):
        answer = chat(client, **options, stop=stop).choices[0]
        assert (answer.finish_reason, answer.stop_reason) == ("tool_calls", None)
        assert [call.function for call in answer.message.tool_calls] == [
            call.function for call in whole.message.tool_calls
        ]


def test_a_call_that_a_stop_string_has_cut_is_no_call_to_execute(default_client: openai.OpenAI) -> None:
    function = {"name": "add", "arguments": '{"a": 3, "b": 4}'}
    called: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c1", "content": "7"},
        {"role": "assistant", "content": "7"},
    ]
    again = [*called, *called, *QUESTION]  # as it did twice, the model calls the function by itself
    options: dict[str, Any] = {"messages": again, "tools": [ADD], "stop": '"b"'}
    cut = chat(default_client, **options).choices[0]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", '"b"')
    assert cut.message.tool_calls[0].function.arguments.startswith('{"a": 3')
    last = [chunk.choices[0] for chunk in chat(default_client, **options, stream=True)][-1]
    assert (last.finish_reason, last.stop_reason) == ("stop", '"b"')
    options |= {"stop": "}}", "extra_body": {"include_stop_str_in_output": True}}
    whole = chat(default_client, **options).choices[0]
    assert (whole.finish_reason, whole.stop_reason) == ("tool_calls", "}}")
    last = [chunk.choices[0] for chunk in chat(default_client, **options, stream=True)][-1]
    assert (last.finish_reason, last.stop_reason) == ("tool_calls", "}}")


def test_histories_as_clients_send_them(http: httpx.Client) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 3, "b": 4}'}, "index": 0}
    messages: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call, {**call, "id": "c2"}], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "7"}]},
        {"role": "tool", "tool_call_id": "c2", "name": "add", "content": "7"},
        {"role": "assistant", "content": "It is 7.", "tool_calls": []},
        {"role": "assistant", "content": None},
        *QUESTION,
    ]
    body = {"messages": messages, "max_tokens": 1, "tool_choice": "none", "tools": []}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    tokens = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    written = '{"name": "add", "arguments": {"a": 3, "b": 4}}'
    assert f"<|im_start|>assistant\n{written}\n{written}<|im_end|>" in text
    assert text.count("The function returned: 7\n") == 2
    with_tools = http.post("/tokenize", json={"messages": messages, "tools": [ADD]}).json()
    assert with_tools["count"] > len(tokens)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"tools": "add"}, "tools"),
        ({"tools": [{"type": "function"}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tools": [ADD] * 257}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"properties": 5}}}]}, "tools"),
        (
            {
                "tools": [
                    {
                        "type": "function",
                        "function": {
                            "name": "f",
                            "strict": True,
                            "parameters": {
                                "type": "object",
                                "properties": {"x": {"type": "array", "uniqueItems": True}},
                            },
                        },
                    }
                ]
            },
            "tools",
        ),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "function": {"name": "sub"}}}, "tool_choice"),
        ({"tools": [ADD], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs"),
        ({"reasoning_effort": "utmost"}, "reasoning_effort"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{"id": "1"}]}]}, "messages"),
        ({"messages": [{"role": "user", "content": None}]}, "messages"),
    ],
)
def test_impossible_requests_are_refused(http: httpx.Client, change: dict[str, Any], param: str) -> None:
    response = http.post("/v1/chat/completions", json={"messages": QUESTION, "max_tokens": 1, **change})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
