"""Clients as people use them, against the real server on the default model: `make clients`.

Their packages are large and exclude some of the tests' own, so they have an environment of their own, and this folder is left
out of the other runs. ``RADIXKV`` is the command that starts RadixKV.
"""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

MODEL = "SmolLM2-135M-Instruct"
KEY = "key-of-the-clients"
QUESTION: Any = [{"role": "user", "content": "What is the weather in Bonn? Answer in one word."}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 12}},
    "required": ["city"],
    "additionalProperties": False,
}


class Person(BaseModel):
    """What structured answers look like: short enough for each to end."""

    name: str = Field(max_length=12)
    age: int = Field(ge=0, le=99)


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    command = [*shlex.split(os.environ["RADIXKV"]), "serve", "--port", "0", "--api-key", KEY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("Serving "), f"the server did not start: {line!r}"
        yield line.split()[-1]
        process.terminate()


# -- openai ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def openai_client(url: str) -> Any:
    import openai

    return openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0)


def test_openai_chat(openai_client: Any) -> None:
    create: Any = openai_client.chat.completions.create
    whole = create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0)
    options = {"stream_options": {"include_usage": True}, "stream": True}
    chunks = list(create(model=MODEL, messages=QUESTION, max_tokens=8, temperature=0, **options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_openai_completions(openai_client: Any) -> None:
    answer = openai_client.completions.create(model=MODEL, prompt="One, two,", max_tokens=4, temperature=0, logprobs=1)
    assert len(answer.choices[0].logprobs.tokens) == 4


def test_openai_chat_tools_and_their_results(openai_client: Any) -> None:
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}]
    options: Any = {"model": MODEL, "tools": tools, "max_tokens": 60, "temperature": 0}
    answer = openai_client.chat.completions.create(messages=QUESTION, tool_choice="required", **options)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert set(json.loads(call.function.arguments)) == {"city"}
    with openai_client.chat.completions.stream(messages=QUESTION, tool_choice="required", **options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [one.function.arguments for one in streamed] == [call.function.arguments]
    history = [*QUESTION, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "Rain."}]
    final = openai_client.chat.completions.create(messages=history, tool_choice="none", **options)
    assert final.choices[0].message.content


def test_openai_chat_parse(openai_client: Any) -> None:
    parsed = openai_client.chat.completions.parse(
        model=MODEL, messages=QUESTION, response_format=Person, max_tokens=60, temperature=0
    )
    assert isinstance(parsed.choices[0].message.parsed, Person)
    # What the client made of the answer is part of the message that it sends back.
    history = [*QUESTION, parsed.choices[0].message, {"role": "user", "content": "Thanks."}]
    openai_client.chat.completions.create(model=MODEL, messages=history, max_tokens=2)


def test_openai_calls_that_were_parsed_are_sent_back(openai_client: Any) -> None:
    openai = pytest.importorskip("openai")
    options: Any = {
        "model": MODEL,
        "tools": [openai.pydantic_function_tool(Person)],
        "max_tokens": 60,
        "temperature": 0,
    }
    answer = openai_client.chat.completions.parse(messages=QUESTION, tool_choice="required", **options)
    message = answer.choices[0].message
    assert isinstance(message.tool_calls[0].function.parsed_arguments, Person)
    results = [{"role": "tool", "tool_call_id": call.id, "content": "Stored."} for call in message.tool_calls]
    openai_client.chat.completions.create(messages=[*QUESTION, message, *results], tool_choice="none", **options)


def test_openai_responses(openai_client: Any) -> None:
    options: Any = {"model": MODEL, "max_output_tokens": 12, "temperature": 0}
    first = openai_client.responses.create(input="Name three colours.", **options)
    with openai_client.responses.stream(input="Name three colours.", **options) as stream:
        events = list(stream)
    text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert events[-1].response.output_text == first.output_text == text
    second = openai_client.responses.create(input="Which is darkest?", previous_response_id=first.id, **options)
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
    assert openai_client.responses.retrieve(first.id).output_text == first.output_text
    openai_client.responses.delete(first.id)


def test_openai_responses_parse_and_tools(openai_client: Any) -> None:
    options: Any = {"model": MODEL, "max_output_tokens": 60, "temperature": 0}
    parsed = openai_client.responses.parse(input="Ann is 30.", text_format=Person, **options)
    assert isinstance(parsed.output_parsed, Person)
    tools: Any = [{"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True}]
    called = openai_client.responses.create(input=QUESTION, tools=tools, tool_choice="required", **options)
    (call,) = [item for item in called.output if item.type == "function_call"]
    assert set(json.loads(call.arguments)) == {"city"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    final = openai_client.responses.create(
        input=[result], previous_response_id=called.id, tools=tools, tool_choice="none", **options
    )
    assert final.output_text


def test_openai_breakpoints(openai_client: Any) -> None:
    mark = {"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}
    messages: Any = [{"role": "system", "content": [{"type": "text", "text": "Be kind. " * 30, **mark}]}, *QUESTION]
    first, second = (
        openai_client.chat.completions.create(model=MODEL, max_tokens=2, messages=messages).usage.prompt_tokens_details
        for _ in range(2)
    )
    assert first.cache_write_tokens > 0
    assert second.cache_write_tokens == 0
    assert second.cached_tokens >= first.cache_write_tokens


# -- anthropic -------------------------------------------------------------------------------------------------------


@pytest.fixture
def anthropic_client(url: str) -> Any:
    import anthropic

    return anthropic.Anthropic(base_url=url, api_key=KEY, max_retries=0)


def test_anthropic_messages(anthropic_client: Any) -> None:
    options: Any = {"model": MODEL, "max_tokens": 12, "messages": QUESTION, "extra_body": {"temperature": 0}}
    system: Any = [{"type": "text", "text": "Be brief. " * 30, "cache_control": {"type": "ephemeral", "ttl": "1h"}}]
    first = anthropic_client.messages.create(system=system, **options)
    assert first.usage.cache_creation_input_tokens > 0
    with anthropic_client.messages.stream(system=system, **options) as stream:
        text = "".join(stream.text_stream)
        usage = stream.get_final_message().usage
    assert text == first.content[0].text
    assert usage.cache_read_input_tokens >= first.usage.cache_creation_input_tokens
    count = anthropic_client.messages.count_tokens(model=MODEL, messages=QUESTION, system=system)
    total = usage.input_tokens + usage.cache_read_input_tokens + usage.cache_creation_input_tokens
    assert count.input_tokens == total


def test_anthropic_tools_and_their_results(anthropic_client: Any) -> None:
    tools: Any = [{"name": "weather", "description": "Tells the weather.", "input_schema": PARAMETERS}]
    options: Any = {"model": MODEL, "max_tokens": 60, "tools": tools, "extra_body": {"temperature": 0}}
    called = anthropic_client.messages.create(messages=QUESTION, tool_choice={"type": "any"}, **options)
    assert called.stop_reason == "tool_use"
    use = next(block for block in called.content if block.type == "tool_use")
    assert set(use.input) == {"city"}
    with anthropic_client.messages.stream(messages=QUESTION, tool_choice={"type": "any"}, **options) as stream:
        streamed = stream.get_final_message()
    assert next(block for block in streamed.content if block.type == "tool_use").input == use.input
    history: Any = [
        *QUESTION,
        {"role": "assistant", "content": called.content},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": use.id, "content": "Rain."}]},
    ]
    final = anthropic_client.messages.create(messages=history, tool_choice={"type": "none"}, **options)
    assert final.content[0].text


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_tool_runner(anthropic_client: Any, stream: bool) -> None:
    from anthropic import beta_tool

    @beta_tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return "Rain."

    runner = anthropic_client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=60,
        messages=QUESTION,
        tools=[weather],
        tool_choice={"type": "any"},
        stream=stream,
        max_iterations=2,
        extra_body={"temperature": 0},
    )
    first, second = (each.get_final_message() if stream else each for each in runner)
    assert first.stop_reason == "tool_use"
    assert second.usage.cache_read_input_tokens > 0


def test_anthropic_models(anthropic_client: Any) -> None:
    (model,) = anthropic_client.models.list()
    assert anthropic_client.models.retrieve(model.id) == model
    assert (model.display_name, model.type) == (MODEL, "model")


def test_anthropic_errors(anthropic_client: Any) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError, match="not served here"):
        anthropic_client.messages.create(model="claude", max_tokens=1, messages=QUESTION)
    with pytest.raises(anthropic.AuthenticationError):
        anthropic_client.with_options(api_key="wrong").messages.create(model=MODEL, max_tokens=1, messages=QUESTION)


# -- frameworks ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_responses_api", [False, True])
def test_langchain_agent_with_two_tools(url: str, use_responses_api: bool) -> None:
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.messages import ToolMessage
    from langchain_openai import ChatOpenAI

    called: list[str] = []

    def weather(city: str) -> str:
        """The weather in a city."""
        called.append("weather")
        return "Rain."

    def time_of_day(city: str) -> str:
        """The time of day in a city."""
        called.append("time_of_day")
        return "Noon."

    @wrap_model_call
    def call_tools_once(request: Any, handler: Callable[[Any], Any]) -> Any:
        # So small a model would not decide well by itself.
        done = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="none" if done else "required"))

    model = ChatOpenAI(
        model=MODEL,
        base_url=f"{url}/v1",
        api_key=KEY,
        max_tokens=80,
        temperature=0,
        use_responses_api=use_responses_api,
    )
    agent = create_agent(model, [weather, time_of_day], middleware=[call_tools_once])
    messages = agent.invoke({"messages": [("user", "What is the weather in Bonn?")]})["messages"]
    assert called
    assert messages[-1].text
    assert messages[-1].usage_metadata["input_token_details"]["cache_read"] > 0


def test_langchain_streams(url: str) -> None:
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model=MODEL, base_url=f"{url}/v1", api_key=KEY, max_tokens=8, temperature=0)
    whole = model.invoke("Name a colour.").text
    assert "".join(chunk.text for chunk in model.stream("Name a colour.")) == whole


def test_litellm(url: str) -> None:
    import litellm

    options: Any = {"messages": QUESTION, "max_tokens": 8, "temperature": 0, "api_key": KEY}
    whole = litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", **options)
    stream = litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", stream=True, **options)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert text == whole.choices[0].message.content
    # With what it adds to answers.
    options["messages"] = [*QUESTION, whole.choices[0].message, {"role": "user", "content": "Thanks."}]
    litellm.completion(model=f"openai/{MODEL}", api_base=f"{url}/v1", **options)
    options["messages"] = QUESTION
    claude = litellm.completion(model=f"anthropic/{MODEL}", api_base=url, **options)
    assert claude.choices[0].message.content == text
    response = litellm.responses(
        model=f"openai/{MODEL}", api_base=f"{url}/v1", api_key=KEY, input="Name a colour.", max_output_tokens=8
    )
    assert response.usage.output_tokens == 8


@pytest.mark.parametrize("mode", ["TOOLS", "JSON_SCHEMA", "RESPONSES_TOOLS", "ANTHROPIC_TOOLS"])
def test_instructor(openai_client: Any, anthropic_client: Any, mode: str) -> None:
    import instructor

    make, sdk = instructor.from_openai, openai_client
    if mode == "ANTHROPIC_TOOLS":
        make, sdk = instructor.from_anthropic, anthropic_client
    client = make(sdk, mode=instructor.Mode[mode])
    limit = {"max_output_tokens" if mode == "RESPONSES_TOOLS" else "max_tokens": 60}
    person = client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Ann is 30."}], response_model=Person, max_retries=0, **limit
    )
    assert isinstance(person, Person)


@pytest.mark.parametrize("kind", ["chat", "responses", "completion"])
def test_llm(url: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models: list[dict[str, Any]] = [
        {
            "model_id": "local",
            "model_name": MODEL,
            "api_base": f"{url}/v1",
            "api_key_name": "local",
            "supports_schema": True,
            "supports_tools": True,
            **({} if kind == "chat" else {kind: True}),
        }
    ]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(models))
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    import llm

    model = llm.get_model("local")
    assert model.prompt("Name a colour.", key=KEY, max_tokens=60, temperature=0).text()
    if kind != "completion":
        person = model.prompt("Ann is 30.", key=KEY, schema=Person, max_tokens=60, temperature=0).text()
        Person.model_validate_json(person)


# -- lm-eval ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["local-completions", "local-chat-completions"])
def test_lm_eval(url: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import lm_eval
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    data = tmp_path / "sums.jsonl"
    rows = [{"question": f"{a}+{b}=", "answer": str(a + b)} for a, b in [(1, 1), (2, 2), (3, 4), (5, 5)]]
    data.write_text("\n".join(json.dumps(row) for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(data)}},
        "test_split": "test",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
    }
    generate = {
        **common,
        "task": "sums_generated",
        "output_type": "generate_until",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 5, "temperature": 0},
        "metric_list": [{"metric": "exact_match"}],
    }
    likelihood = {
        **common,
        "task": "sums_chosen",
        "output_type": "multiple_choice",
        "doc_to_choice": ["2", "4", "7", "10"],
        "doc_to_target": "{{['2', '4', '7', '10'].index(answer)}}",
        "metric_list": [{"metric": "acc"}],
    }
    is_chat = model == "local-chat-completions"
    endpoint = "/v1/chat/completions" if is_chat else "/v1/completions"
    arguments: dict[str, Any] = {"model": MODEL, "base_url": f"{url}{endpoint}", "max_retries": 1}
    if not is_chat:  # the tokenizer is asked over HTTP, too
        arguments |= {"tokenizer_backend": "remote", "auth_token": KEY}
    results = lm_eval.simple_evaluate(
        model=model,
        model_args=arguments,
        tasks=[generate] if is_chat else [generate, likelihood],
        task_manager=TaskManager(),
        apply_chat_template=is_chat,
        bootstrap_iters=0,
    )
    assert results is not None
    scores = results["results"]
    assert "exact_match,none" in scores["sums_generated"]
    if not is_chat:
        assert scores["sums_chosen"]["acc,none"] > 0
