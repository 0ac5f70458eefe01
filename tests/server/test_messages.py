"""`/v1/messages`: Anthropic's form of requests, answers, streams and errors.

Anthropic's package takes seven seconds to import, so only the process that runs these tests does so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cache
from typing import Any
from unittest.mock import Mock

import httpx
import pytest
from pydantic import TypeAdapter
from support.chat_templates import TEMPLATES, make_tokenizer
from support.in_process_server import served
from support.messages_requests import BODY, IMAGE, QUESTION, RESULT, TEXT, USE
from support.model_zoo import build
from support.named_events import named_events

from radixkv import LLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.messages.output import MessageContent
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin


@cache
def stream_event() -> TypeAdapter[Any]:
    from anthropic.types import RawMessageStreamEvent

    return TypeAdapter(RawMessageStreamEvent)


async def create(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    response = await client.post("/v1/messages", json={**BODY, **fields})
    assert response.status_code == 200, response.text
    body: dict[str, Any] = response.json()
    from anthropic.types import Message

    Message.model_validate(body)  # Anthropic's own model
    return body


def events_of(text: str) -> list[dict[str, Any]]:
    """The events of a stream, each checked against Anthropic's model, pings left out."""
    events = [event for event in named_events(text) if event["type"] != "ping"]
    for event in events:
        stream_event().validate_python(event)
    return events


async def test_a_message_and_its_stream_are_the_chat_s_answer(llm: LLM) -> None:
    async with served(llm) as client:
        messages = [{"role": "system", "content": "Be brief.\nAlways."}, QUESTION]
        chat = await client.post(
            "/v1/chat/completions", json={"messages": messages, "max_tokens": 12, "temperature": 0}
        )
        text = chat.json()["choices"][0]["message"]["content"]
        system = [{"type": "text", "text": "Be brief."}, {"type": "text", "text": "Always."}]
        whole = await create(client, system=system)
        assert whole["content"] == [{"type": "text", "text": text}]
        assert (whole["stop_reason"], whole["stop_sequence"]) == ("max_tokens", None)
        usage, num_prompt = whole["usage"], chat.json()["usage"]["prompt_tokens"]
        assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (1, num_prompt - 1)
        count = await client.post(
            "/v1/messages/count_tokens", json={"model": "model", "system": system, "messages": [QUESTION]}
        )
        assert count.json() == {"input_tokens": num_prompt}

        response = await client.post("/v1/messages", json={**BODY, "system": system, "stream": True})
        events = events_of(response.text)
        kinds = [event["type"] for event in events]
        assert kinds[:2] == ["message_start", "content_block_start"]
        assert set(kinds[2:-3]) == {"content_block_delta"}
        assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
        # What was cached is known from the first event on.
        assert events[0]["message"]["usage"]["cache_read_input_tokens"] == num_prompt - 1
        assert "".join(event["delta"]["text"] for event in events[2:-3]) == text
        assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
        assert events[-2]["usage"] == usage


async def test_stop_sequences_prefilled_answers_and_ends(default_llm: LLM) -> None:
    async with served(default_llm) as client:
        text = (await create(client))["content"][0]["text"]
        stop = text.split()[1]
        stopped = await create(client, stop_sequences=["never", stop])
        assert (stopped["stop_reason"], stopped["stop_sequence"]) == ("stop_sequence", stop)
        assert stopped["content"][0]["text"] == text[: text.index(stop)]
        prefill = text[: text.index(" ", 6)]
        continued = await create(client, messages=[QUESTION, {"role": "assistant", "content": prefill}])
        assert (prefill + continued["content"][0]["text"]).startswith(text)
        ended = await create(client, messages=[{"role": "user", "content": "Say hi."}], max_tokens=60)
        assert (ended["stop_reason"], ended["stop_sequence"]) == ("end_turn", None)


async def test_an_answer_without_text_has_no_block_whole_or_streamed(llm: LLM) -> None:
    """The whole message had an empty block of text, which no event announced, and which Anthropic's answers do not have."""
    async with served(llm) as client:
        fields = {"stop_sequences": [(await create(client))["content"][0]["text"][0]]}
        whole = await create(client, **fields)
        assert (whole["content"], whole["stop_reason"]) == ([], "stop_sequence")
        response = await client.post("/v1/messages", json={**BODY, **fields, "stream": True})
        kinds = [event["type"] for event in events_of(response.text)]
        assert kinds == ["message_start", "message_delta", "message_stop"]


async def test_an_empty_last_answer_is_no_prefill(llm: LLM) -> None:
    """An empty text used to be refused where an empty list of blocks was not."""
    async with served(llm) as client:
        expected = (await create(client))["content"]
        for content in ("", [], [{"type": "text", "text": ""}]):
            answer = await create(client, messages=[QUESTION, {"role": "assistant", "content": content}])
            assert answer["content"] == expected


async def test_a_tool_is_used_and_its_result_read(default_llm: LLM) -> None:
    city = {"type": "object", "properties": {"city": {"enum": ["Bonn", "Rome"]}}, "required": ["city"]}
    tools = [{"name": "weather", "description": "Tells the weather.", "input_schema": city}]
    question = {"role": "user", "content": "What is the weather in Rome?"}
    async with served(default_llm) as client:
        fields: dict[str, Any] = {"messages": [question], "tools": tools, "max_tokens": 80}
        called = await create(client, **fields, tool_choice={"type": "tool", "name": "weather"})
        assert called["stop_reason"] == "tool_use"
        (use,) = called["content"]
        assert use["input"]["city"] in ("Bonn", "Rome")
        uncut = await create(client, **fields, tool_choice={"type": "any"}, stop_sequences=['"city"'])
        assert (uncut["stop_reason"], uncut["stop_sequence"]) == ("tool_use", None)
        nothing: dict[str, Any] = {**fields, "max_tokens": 5, "tool_choice": {"type": "any"}}
        assert (await create(client, **nothing))["content"] == []
        nothing_streamed = await client.post("/v1/messages", json={**BODY, **nothing, "stream": True})
        kinds = [event["type"] for event in events_of(nothing_streamed.text)]
        assert kinds == ["message_start", "message_delta", "message_stop"]
        streamed = await client.post(
            "/v1/messages", json={**BODY, **fields, "tool_choice": {"type": "any"}, "stream": True}
        )
        events = events_of(streamed.text)
        start = next(event for event in events if event["type"] == "content_block_start")
        assert (start["content_block"]["name"], start["content_block"]["input"]) == ("weather", {})
        parts = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
        assert json.loads("".join(parts))["city"] in ("Bonn", "Rome")
        assert events[-2]["delta"]["stop_reason"] == "tool_use"
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": "It rains."}
        fields["messages"] = [
            question,
            {"role": "assistant", "content": called["content"]},
            {"role": "user", "content": [result]},
        ]
        final = await create(client, **fields, tool_choice={"type": "none"})
        assert final["content"][0]["type"] == "text"
        usage = final["usage"]
        counted = await client.post(
            "/v1/messages/count_tokens", json={"model": "model", "tools": tools, "messages": fields["messages"]}
        )
        assert counted.json()["input_tokens"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


async def test_errors_have_anthropic_s_form_wherever_they_arise(llm: LLM) -> None:
    async with served(llm, tenants=Tenants(["ann"])) as client:

        async def error(key: dict[str, str] | None = None, content: bytes | None = None, **fields: Any) -> Any:
            headers = {"x-api-key": "ann", "content-type": "application/json"} if key is None else key
            sent = json.dumps({**BODY, **fields}).encode() if content is None else content
            response = await client.post("/v1/messages", content=sent, headers=headers)
            body = response.json()
            assert set(body) == {"type", "error"}
            assert body["type"] == "error"
            assert set(body["error"]) == {"type", "message"}
            return response.status_code, body["error"]["type"], body["error"]["message"]

        assert (await error({}))[:2] == (401, "authentication_error")
        assert (await error(model="other"))[:2] == (404, "not_found_error")
        assert (await error(content=b" " * (9 << 20)))[:2] == (413, "request_too_large")
        assert (await error(content=b"{"))[:2] == (400, "invalid_request_error")
        for fields, named in [
            ({"max_tokens": None}, "max_tokens"),
            ({"messages": []}, "messages"),
            (
                {"messages": [QUESTION, {"role": "user", "content": [TEXT, IMAGE]}]},
                "messages.1.content.1.image: expected text, which is all that this model reads",
            ),
            ({"messages": [{"role": "user", "content": []}]}, "at least one with content"),
            ({"messages": [{"role": "user", "content": "a " * 9000}]}, "prompt is too long: messages: "),
            ({"messages": [{"role": "assistant", "content": ""}]}, "at least one with content"),
            (
                {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "audio"}]}]}]},
                "messages.0.content.0.content.0: content blocks of type 'audio' are not supported, only text, image",
            ),
            (
                {"messages": [QUESTION, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, USE]}]},
                "messages: the last message ends in tool calls, not in text",
            ),
            (
                {"messages": [QUESTION, {"role": "assistant", "content": [USE]}]},
                "messages: the last message ends in tool calls, not in text",
            ),
            (
                {"tools": [{"type": "web_search_20250305", "name": "web_search", "max_uses": 8}]},
                "tools.0: tools of type 'web_search_20250305' are not supported, only custom",
            ),
            ({"tools": [{"name": "a b", "input_schema": {"type": "object"}}]}, "tools.0.name: "),
            ({"tool_choice": {"type": "tool"}}, "tool_choice"),
            ({"tool_choice": {"type": "any"}}, "tool_choice: 'any' needs tools, and there are none"),
            ({"tool_choice": {"type": "tool", "name": "f"}}, "tool_choice: 'tool' needs tools, and there are none"),
            ({"stop_sequences": [""]}, "stop_sequences"),
            ({"temperature": -1}, "temperature"),
            ({"mcp_servers": [{}]}, "mcp_servers: not supported"),
            ({"unknown": 1}, "unknown"),
        ]:
            status, kind, message = await error(**fields)
            assert (status, kind) == (400, "invalid_request_error")
            assert named in message
        for length in (9000, 4_000_000):
            _, _, message = await error(messages=[{"role": "user", "content": "a " * length}])
            found = re.search(r"prompt is too long[^0-9]*(\d+)\s*tokens?\s*>\s*(\d+)", message)  # as Claude Code does
            assert found
            assert int(found[1]) > int(found[2])


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ({"type": "text", "data": "x", "media_type": "text/markdown"}, ".media_type: expected 'text/plain'"),
        ({"type": "text", "data": "x", "name": "a.txt"}, ".name: unknown or not supported"),
        ({"type": "text"}, ".data: required"),
        ({"type": "content"}, ".content: required"),
        (
            {"type": "content", "content": [{"type": "text", "text": 5}, TEXT]},
            ".content.0.text: expected a valid string",
        ),
        ({"type": "content", "content": [{"text": "x"}]}, ".content.0.type: required"),
        ({"data": "x"}, ".type: required"),
        ("x", ": expected a valid dictionary"),
    ],
)
async def test_a_document_of_text_with_a_wrong_field_is_not_taken_for_another_kind(
    llm: LLM, source: Any, wrong: str
) -> None:
    """In a tool's result, a note stood for its text; from the user, it was refused as if it were no text."""
    async with served(llm) as client:
        document = {"type": "document", "source": source}
        for path, block in (("source", document), ("content.0.source", {**RESULT, "content": [document]})):
            messages = [{"role": "user", "content": [block]}]
            response = await client.post("/v1/messages", json={**BODY, "messages": messages})
            assert response.status_code == 400
            assert f"messages.0.content.0.{path}{wrong}" in response.json()["error"]["message"]


async def test_a_crash_is_an_error_or_the_last_event(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine._runner, "run", Mock(side_effect=ZeroDivisionError("planted")))
    async with served(llm) as client:
        whole = await client.post("/v1/messages", json=BODY)
        assert (whole.status_code, whole.json()["error"]["type"]) == (500, "api_error")
        streamed = await client.post("/v1/messages", json={**BODY, "stream": True})
        (event,) = named_events(streamed.text)
        assert (event["type"], event["error"]["type"]) == ("error", "api_error")
        assert "planted" not in whole.text + streamed.text


async def test_an_unexpected_error_has_anthropic_s_form_too(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    crash = Mock(side_effect=ZeroDivisionError("planted"))
    monkeypatch.setattr("radixkv.server.messages.routes.as_chat_request", crash)
    async with served(llm) as client:
        response = await client.post("/v1/messages", json=BODY)
        assert (response.status_code, response.json()["error"]["type"]) == (500, "api_error")


async def test_fields_of_unsupported_features_are_accepted_where_they_request_nothing(llm: LLM) -> None:
    async with served(llm) as client:
        output: Any = {"output_config": {"task_budget": None}, "thinking": {"type": "disabled", "block_binding": None}}
        nothing = ("thread", "fallbacks", "fallback_credit_token", "billing_policy", "compaction")
        await create(client, **dict.fromkeys(nothing), **output)
        billing = {"type": "billing_policy", "bill_to": "self"}
        await create(client, fallbacks="default", billing_policy=billing)
        counted = await client.post(
            "/v1/messages/count_tokens",
            json={"model": "model", "messages": [QUESTION], "billing_policy": billing, "compaction": None, **output},
        )
        assert counted.status_code == 200, counted.text
        for fields in (
            {"fallbacks": [{"model": "claude"}]},
            {"fallback_credit_token": "x"},
            {"billing_policy": {**billing, "bill_to": "user_profile"}},
            {"compaction": {"type": "summarize"}},
            {"output_config": {"task_budget": {"type": "tokens", "total": 9}}},
        ):
            refused = await client.post("/v1/messages", json={**BODY, **fields})
            assert refused.status_code == 400
            assert "not supported" in refused.json()["error"]["message"]
            assert "details" not in refused.json()["error"]


async def test_conversations_that_differ_in_their_billing_header_share_the_rest(llm: LLM) -> None:
    """Claude Code's header stands before everything, so no conversation found what another had computed."""
    async with served(llm) as client:

        def system(version: str) -> list[dict[str, Any]]:
            header = f"x-anthropic-billing-header: cc_version={version}; cc_entrypoint=cli;"
            return [{"type": "text", "text": header}, {"type": "text", "text": "You sort billing headers. " * 8}]

        first, second = [(await create(client, system=system(each)))["usage"] for each in ("2.1.99e", "2.1.0a4")]
        num_prompt = first["input_tokens"] + first["cache_read_input_tokens"]
        assert (second["input_tokens"], second["cache_read_input_tokens"]) == (1, num_prompt - 1)


def events_for(content: MessageContent, pieces: Sequence[AnswerPiece]) -> list[tuple[str, int]]:
    """The kind and the block of each event for these pieces, which are the whole content; anthropic's model takes each."""
    events = [event.model_dump() for piece in pieces for event in content.add(piece)]
    events += [event.model_dump() for event in content.end()]
    for event in events:
        stream_event().validate_python(event)
    return [(event["type"].removeprefix("content_block_"), event["index"]) for event in events]


def test_pieces_become_blocks_and_their_events() -> None:
    content = MessageContent()
    pieces = [
        ReasoningPiece("Hm"),
        ReasoningPiece("m."),
        TextPiece("Let me see."),
        ToolCallBegin(0, "t1", "weather"),
        ToolCallArguments(0, '{"city": '),
        ToolCallArguments(0, '"Bonn"}'),
        ToolCallBegin(1, "t2", "time"),
        ToolCallArguments(1, '{"zone": "Eu'),
    ]
    assert events_for(content, pieces) == [
        *[("start", 0), ("delta", 0), ("delta", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("stop", 1)],
        *[("start", 2), ("delta", 2), ("delta", 2), ("stop", 2)],
        *[("start", 3), ("delta", 3), ("stop", 3)],
    ]
    assert [block.model_dump() for block in content.blocks] == [
        {"type": "thinking", "thinking": "Hmm.", "signature": ""},
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "id": "t1", "name": "weather", "input": {"city": "Bonn"}},
        # Cut short within a value: what was complete before it.
        {"type": "tool_use", "id": "t2", "name": "time", "input": {}},
    ]


def test_thinking_that_is_not_to_be_shown_leaves_an_empty_block() -> None:
    content = MessageContent(shows_thinking=False)
    pieces = [ReasoningPiece("Hm"), ReasoningPiece("m."), TextPiece("Rain.")]
    assert events_for(content, pieces) == [
        *[("start", 0), ("stop", 0)],
        *[("start", 1), ("delta", 1), ("stop", 1)],
    ]
    assert [block.model_dump() for block in content.blocks] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": "Rain."},
    ]


async def test_thinking_is_counted_whether_it_is_shown_or_not() -> None:
    tokenizer = make_tokenizer(TEMPLATES["think_open"])
    # By this seed, the last token has a text.
    llm = LLM(build("llama", {"vocab_size": len(tokenizer)}, seed=1), tokenizer=tokenizer, num_blocks=40)
    async with served(llm) as client:
        shown, hidden = [
            await create(client, thinking={"type": "adaptive", "display": display}) for display in (None, "omitted")
        ]
        (block,) = shown["content"]
        assert block["thinking"]
        assert hidden["content"] == [{**block, "thinking": ""}]
        for usage in (shown["usage"], hidden["usage"]):
            assert usage["output_tokens_details"] == {"thinking_tokens": usage["output_tokens"]}
