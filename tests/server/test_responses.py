"""`/v1/responses`: items in, items and events out."""

from __future__ import annotations

import itertools
import json
from typing import Any, Literal, cast

import httpx2
import openai
import pytest
from pydantic import BaseModel
from support.in_process_server import make_service, served
from support.named_events import named_events
from support.response_requests import BODY, EVENT, create

from radixkv import LLM, AsyncLLM
from radixkv.server.app import create_app


def events_of(text: str) -> list[dict[str, Any]]:
    """The numbered events of a stream, each checked against openai's model."""
    events = named_events(text)
    for event in events:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def without_ids(value: Any) -> Any:
    """A response without what differs from one to the next."""
    if isinstance(value, dict):
        return {name: without_ids(part) for name, part in value.items() if name not in ("id", "created_at", "usage")}
    return [without_ids(part) for part in value] if isinstance(value, list) else value


async def test_a_response_and_its_stream_are_the_chat_s_answer(llm: LLM) -> None:
    async with served(llm) as client:
        chat = await client.post(
            "/v1/chat/completions",
            json={
                "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": BODY["input"]}],
                "max_tokens": 12,
                "temperature": 0,
            },
        )
        whole = await create(client, instructions="Be brief.")
        (message,) = whole["output"]
        assert message["content"][0]["text"] == chat.json()["choices"][0]["message"]["content"]
        assert whole["status"] == "incomplete"
        assert whole["incomplete_details"] == {"reason": "max_output_tokens"}
        assert whole["usage"]["input_tokens"] == chat.json()["usage"]["prompt_tokens"]
        assert whole["usage"]["output_tokens"] == 12

        response = await client.post("/v1/responses", json={**BODY, "instructions": "Be brief.", "stream": True})
        events = events_of(response.text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        deltas = kinds.count("output_text.delta")
        assert deltas > 1  # how many depends on drafts, and on how fast they are read
        assert kinds == [
            *("created", "in_progress", "output_item.added", "content_part.added"),
            *["output_text.delta"] * deltas,
            *("output_text.done", "content_part.done", "output_item.done", "incomplete"),
        ]
        text = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert text == message["content"][0]["text"]
        assert without_ids(events[-1]["response"]) == without_ids(whole)
        # What was announced at first was not yet complete.
        assert events[0]["response"]["output"] == []
        assert events[2]["item"]["content"] == []


async def test_a_response_repeats_the_request_s_options(llm: LLM) -> None:
    async with served(llm) as client:
        cut = await create(client)
        assert (cut["service_tier"], cut["top_logprobs"], cut["completed_at"]) == ("default", 0, None)
        names = ("prompt_cache_key", "safety_identifier", "prompt_cache_options")
        assert [cut[name] for name in names] == [None] * 3
        nothing = {"prewarm": False, "comparison_response_id": None}
        sent = {"prompt_cache_key": "k", "safety_identifier": "s", "prompt_cache_options": {"ttl": "12h", **nothing}}
        text = {"format": {"type": "json_schema", "name": "x", "schema": {"const": 1}}}
        hints = {"service_tier": "auto", "max_tool_calls": 3, "prompt_cache_retention": "24h"}
        whole = await create(client, **sent, **hints, text={**text, "verbosity": "low"})
        assert [whole[name] for name in names] == ["k", "s", {"mode": "implicit", "ttl": "12h"}]
        assert (whole["status"], whole["service_tier"]) == ("completed", "default")
        assert whole["completed_at"] >= whole["created_at"]


async def test_an_earlier_response_is_continued_with_all_that_was_computed_for_it(llm: LLM) -> None:
    async with served(llm) as client:
        question = "Which of these is the darkest?"
        first = await create(client, instructions="Be brief.")
        second = await create(
            client, input=question, previous_response_id=first["id"], instructions="Be brief.", stream=False
        )
        usage = first["usage"]
        # The last token of an answer is computed only when something follows it.
        computed = usage["input_tokens"] + usage["output_tokens"] - 1
        assert second["usage"]["input_tokens_details"]["cached_tokens"] == computed
        assert second["previous_response_id"] == first["id"]
        # The same as with all items sent again by the client.
        items = [{"role": "user", "content": BODY["input"]}, *first["output"], {"role": "user", "content": question}]
        stateless = await create(client, input=items, instructions="Be brief.", store=False)
        assert without_ids(stateless["output"]) == without_ids(second["output"])
        assert stateless["usage"]["input_tokens"] == second["usage"]["input_tokens"]
        # Instructions are those of each request.
        other = await create(client, input=question, previous_response_id=first["id"])
        assert other["usage"]["input_tokens"] < second["usage"]["input_tokens"] + 40
        assert other["usage"]["input_tokens"] != second["usage"]["input_tokens"]


async def test_text_format_enforces_a_schema(llm: LLM) -> None:
    async with served(llm) as client:
        schema = {
            "type": "object",
            "properties": {"colour": {"enum": ["red", "green"]}},
            "required": ["colour"],
            "additionalProperties": False,
        }
        form = {"format": {"type": "json_schema", "name": "answer", "schema": schema, "strict": True}}
        answer = await create(client, text=form, max_output_tokens=30)
        assert json.loads(answer["output"][0]["content"][0]["text"])["colour"] in ("red", "green")
        assert answer["text"] == form
        assert answer["status"] == "completed"


async def test_a_function_is_called_and_its_result_read(llm: LLM) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
    tools = [{"type": "function", "name": "weather", "description": "Tells the weather.", "parameters": city}]
    async with served(llm) as client:
        fields: dict[str, Any] = {"tools": tools, "max_output_tokens": 80}
        choice = {"type": "function", "name": "weather"}
        called = await create(client, input="What is the weather in Rome?", tool_choice=choice, **fields)
        (call,) = called["output"]
        assert (call["type"], call["name"], call["status"]) == ("function_call", "weather", "completed")
        assert json.loads(call["arguments"])["city"] in ("Bonn", "Rome")
        some = {"type": "allowed_tools", "mode": "required", "tools": [choice]}
        allowed = await create(client, input="What is the weather in Rome?", tool_choice=some, **fields)
        assert allowed["tool_choice"] == some
        assert {item["name"] for item in allowed["output"]} == {"weather"}
        streamed = await client.post(
            "/v1/responses",
            json={**BODY, **fields, "input": "What is the weather in Rome?", "tool_choice": choice, "stream": True},
        )
        events = events_of(streamed.text)
        kinds = [event["type"].removeprefix("response.") for event in events]
        assert kinds[2] == "output_item.added"
        assert kinds[-3:] == ["function_call_arguments.done", "output_item.done", "completed"]
        assert set(kinds[3:-3]) == {"function_call_arguments.delta"}
        assert "".join(event["delta"] for event in events[3:-3]) == events[-3]["arguments"] == call["arguments"]
        nothing: dict[str, Any] = {"tools": tools, "max_output_tokens": 5, "tool_choice": choice}
        cut = await create(client, input="What is the weather in Rome?", **nothing)
        assert (cut["status"], cut["output"]) == ("incomplete", [])
        streamed = await client.post("/v1/responses", json={**BODY, **nothing, "stream": True})
        kinds = [event["type"].removeprefix("response.") for event in events_of(streamed.text)]
        assert kinds == ["created", "in_progress", "incomplete"]
        again = await create(client, input="Well?", previous_response_id=cut["id"], tool_choice="none", **fields)
        assert again["output"][0]["type"] == "message"
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "It rains."}
        final = await create(client, input=[result], previous_response_id=called["id"], tool_choice="none", **fields)
        assert final["output"][0]["type"] == "message"
        cached = final["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= called["usage"]["input_tokens"] - 1


@pytest.mark.parametrize(
    ("fields", "param", "named"),
    [
        ({"background": True}, "background", "not supported"),
        ({"conversation": "conv_1"}, "conversation", "not supported"),
        ({"include": ["message.output_audio"]}, "include", "include.0: expected 'message.output_text.logprobs', "),
        ({"top_logprobs": 21}, "top_logprobs", "less than or equal to 20, got 21"),
        (
            {"prompt_cache_options": {"prewarm": True}},
            "prompt_cache_options",
            "prompt_cache_options.prewarm: not supported",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "'web_search'"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools", "tools.0.name: "),
        ({"input": [{"type": "computer_call"}]}, "input", "'computer_call'"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "'input_image'"),
        ({"input": []}, "input", "at least one"),
        (
            {"text": {"verbosity": "lengthy"}},
            "text",
            "text.verbosity: expected 'low', 'medium' or 'high', got 'lengthy'",
        ),
        ({"unknown": 1}, "unknown", "unknown"),
        ({"max_output_tokens": 0}, "max_output_tokens", "expected greater than or equal to 1, got 0"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"reasoning": {"effort": "enormous"}}, "reasoning.effort", "minimal"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"enum": []}}}}, "text.format", "schema"),
        ({"metadata": {"topic": "\ud83c"}}, "metadata", "metadata.topic"),
        ({"metadata": {"\ud83c": "x"}}, "metadata", "metadata"),
        ({"user": "\ud83c"}, "user", "user"),
        ({"prompt_cache_key": "\ud83c"}, "prompt_cache_key", "prompt_cache_key"),
        ({"reasoning": {"summary": "\ud83c"}}, "reasoning", "reasoning.summary"),
        ({"text": {"format": {"type": "json_schema", "name": "\ud83c", "schema": {}}}}, "text", "text.format.name"),
        (
            {"input": [{"type": "function_call_output", "call_id": "\ud83c", "output": "x"}]},
            "input",
            "input.0.call_id: expected Unicode text",
        ),
        ({"\ud83c": "x"}, None, "body"),
    ],
)
async def test_what_is_impossible_or_not_supported_is_refused_by_name(
    llm: LLM, fields: dict[str, Any], param: str | None, named: str
) -> None:
    async with served(llm) as client:
        # As bytes: httpx does not encode half of a surrogate pair.
        content, headers = json.dumps({**BODY, **fields}).encode(), {"content-type": "application/json"}
        response = await client.post("/v1/responses", content=content, headers=headers)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert named in error["message"]


async def test_a_crash_within_a_stream_is_its_last_event(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*arguments: Any) -> Any:
        raise ZeroDivisionError("planted")

    monkeypatch.setattr(llm.engine._runner, "run", crash)
    async with served(llm) as client:
        response = await client.post("/v1/responses", json={**BODY, "stream": True})
        events = events_of(response.text)
        assert [event["type"] for event in events] == ["response.created", "response.in_progress", "response.failed"]
        failed = events[-1]["response"]
        assert failed["status"] == "failed"
        assert failed["error"]["code"] == "server_error"
        assert "planted" not in response.text
        assert (await client.get(f"/v1/responses/{failed['id']}")).status_code == 404


async def test_what_was_written_before_a_crash_is_in_the_failed_response(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, num_steps = llm.engine._runner.run, itertools.count()

    def crash_later(*arguments: Any) -> Any:
        if next(num_steps) == 4:
            raise ZeroDivisionError("planted")
        return run(*arguments)

    monkeypatch.setattr(llm.engine._runner, "run", crash_later)
    async with served(llm) as client:
        response = await client.post("/v1/responses", json={**BODY, "stream": True})
        events = events_of(response.text)
        written = "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")
        assert [event["type"] for event in events][-2:] == ["response.output_item.done", "response.failed"]
        (item,) = events[-1]["response"]["output"]
        assert (item["status"], item["content"][0]["text"]) == ("incomplete", written)
        assert written


async def test_openai_s_own_client(llm: LLM) -> None:
    class Answer(BaseModel):
        colour: Literal["red", "green"]

    async with AsyncLLM(llm) as engine:
        transport = httpx2.ASGITransport(create_app(make_service(engine)))
        async with openai.AsyncOpenAI(
            base_url="http://localhost/v1",
            api_key="none",
            max_retries=0,
            http_client=openai.DefaultAsyncHttpxClient(transport=transport),
        ) as client:
            options: Any = {"model": "model", "max_output_tokens": 12, "temperature": 0}
            whole = await client.responses.create(input="Name three colours.", **options)
            async with client.responses.stream(input="Name three colours.", **options) as stream:
                events = [event async for event in stream]
            assert events[-1].type == "response.incomplete"
            assert events[-1].response.output_text == whole.output_text != ""
            assert (await client.responses.retrieve(whole.id, stream=False)).output_text == whole.output_text
            for refused in ({"stream": True}, {"starting_after": 1}):
                with pytest.raises(openai.BadRequestError, match="not supported") as error:
                    await client.responses.retrieve(whole.id, **cast(Any, refused))
                assert error.value.param in refused
            options["max_output_tokens"] = 30
            parsed = await client.responses.parse(
                input="Which?", text_format=Answer, previous_response_id=whole.id, **options
            )
            assert isinstance(parsed.output_parsed, Answer)
            history: Any = [{"role": "user", "content": "Which?"}, *parsed.model_dump()["output"]]
            await client.responses.create(input=[*history, {"role": "user", "content": "And?"}], **options)
            await client.responses.delete(whole.id)
            with pytest.raises(openai.NotFoundError, match="no response"):
                await client.responses.create(input="And?", previous_response_id=whole.id, **options)
