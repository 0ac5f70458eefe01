"""Requests of Codex CLI 0.171, as recorded, with its texts and its tools' schemas shortened."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from support.in_process_server import served
from support.named_events import named_events

from radixkv import LLM
from radixkv.server.responses.request import ResponseRequest
from radixkv.server.responses.translation import as_chat_request, conversation_breakpoints, input_messages

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def message(role: str, text: str) -> dict[str, Any]:
    return {"type": "message", "id": "msg_1", "role": role, "content": [{"type": "input_text", "text": text}]}


def function(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return {"type": "function", "name": name, "description": "It does.", "strict": False, "parameters": parameters}


AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for spawning and managing sub-agents.",
    "tools": [function("close_agent", target={"enum": ["a1"]}), function("spawn_agent", message={"enum": ["Go on."]})],
}
BODY: dict[str, Any] = {
    "model": "model",
    "stream": True,
    "input": [
        message("developer", "You are a coding agent."),
        message("developer", "<skills_instructions>...</skills_instructions>"),
        message("user", "<environment_context>...</environment_context>"),
        message("user", "Say hi"),
    ],
    "tools": [function("exec_command", cmd={"type": "string"}), AGENTS, function("get_goal")],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "store": False,
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a22366-ad48-7782-b137-93fb2d20308c",
    "client_metadata": {
        "turn_id": "01a22366-ad61-74f3-b4e9-c1cd9acc6ee2",
        "x-codex-turn-metadata": '{"request_kind":"turn","sandbox":"seccomp"}',
    },
}


async def responded(client: httpx.AsyncClient, **fields: Any) -> dict[str, Any]:
    """The response at the end of a stream, whose events openai's client could read."""
    answer = await client.post("/v1/responses", json={**BODY, "max_output_tokens": 40, "temperature": 0, **fields})
    assert answer.status_code == 200, answer.text
    events = named_events(answer.text)
    for event in events:
        EVENT.validate_python(event)
    response: dict[str, Any] = events[-1]["response"]
    Response.model_validate(response)
    return response


async def test_a_function_in_a_namespace_is_called_and_its_result_read(llm: LLM) -> None:
    async with served(llm) as client:
        choice = {"type": "function", "name": "multi_agent_v1__spawn_agent"}
        called = await responded(client, tool_choice=choice)
        (call,) = called["output"]
        assert (call["namespace"], call["name"]) == ("multi_agent_v1", "spawn_agent")
        assert json.loads(call["arguments"]) == {"message": "Go on."}
        assert [tool["name"] for tool in called["tools"][1]["tools"]] == ["close_agent", "spawn_agent"]
        result = {"type": "function_call_output", "id": "fco_1", "call_id": call["call_id"], "output": "a1"}
        after = await responded(client, input=[*BODY["input"], call, result])
        # The call is written as the model wrote it.
        cached = after["usage"]["input_tokens_details"]["cached_tokens"]
        assert cached >= called["usage"]["input_tokens"] - 1
        other = await responded(client, tool_choice={"type": "function", "name": "get_goal"})
        assert [(item["namespace"], item["name"]) for item in other["output"]] == [(None, "get_goal")]


def test_namespaces_keep_functions_of_one_name_apart() -> None:
    tools = [function("read"), *({"type": "namespace", "name": name, "tools": [function("read")]} for name in "ab")]
    chat = as_chat_request(ResponseRequest.model_validate({"input": "x", "tools": tools}), [])
    assert [tool["function"]["name"] for tool in chat["tools"]] == ["read", "a__read", "b__read"]
    call = {"type": "function_call", "call_id": "c1", "namespace": "b", "name": "read", "arguments": "{}"}
    (turn,) = input_messages(ResponseRequest.model_validate({"input": [call]}).input)
    assert turn["tool_calls"][0]["function"]["name"] == "b__read"


@pytest.mark.parametrize(
    ("tools", "named"),
    [
        (
            [AGENTS, {"type": "web_search", "external_web_access": False}],
            "tools of type 'web_search' are not supported",
        ),
        ([{**AGENTS, "tools": [{"type": "custom", "name": "x"}]}], "tools in a namespace of type 'custom'"),
        (
            [AGENTS, function("multi_agent_v1__spawn_agent")],
            "expected different names, got 'multi_agent_v1__spawn_agent'",
        ),
        ([{**AGENTS, "name": "n" * 128}], f"got '{'n' * 20}"),
    ],
)
async def test_tools_that_cannot_be_offered_are_refused_by_name(llm: LLM, tools: list[Any], named: str) -> None:
    async with served(llm) as client:
        answer = await client.post("/v1/responses", json={**BODY, "tools": tools})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "tools"
        assert named in answer.json()["error"]["message"]


def test_a_function_s_output_without_a_call_is_a_message_of_the_user() -> None:
    """Codex's goals: after `create_goal`, every later request of the session was refused."""
    created = {"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": '{"goal":{}}'}
    told = {"type": "function_call_output", "id": "fco_2", "namespace": "agent", "output": "Be kind."}
    items = [created, {**told, "name": "goal_objective"}, told, message("user", "And now bye")]
    assert input_messages(ResponseRequest.model_validate({"input": items}).input) == [
        {"role": "tool", "tool_call_id": "c1", "content": '{"goal":{}}'},
        {"role": "user", "content": "goal_objective: Be kind.\nBe kind.\nAnd now bye"},
    ]


def test_a_note_stands_for_an_image_that_a_function_returned() -> None:
    """Codex's `view_image`: every later request of the session was refused."""
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo=", "detail": "high"}
    mark = {"mode": "explicit"}
    output = [{"type": "input_text", "text": "It is", "prompt_cache_breakpoint": mark}, image]
    body = ResponseRequest.model_validate(
        {"input": [{"type": "function_call_output", "id": "fco_1", "call_id": "c1", "output": output}]}
    )
    result = {"role": "tool", "tool_call_id": "c1", "content": "It is\n[image left out: this model reads text only]"}
    assert input_messages(body.input) == [result]
    (point,) = conversation_breakpoints(body, None)
    assert point.messages == [{**result, "content": "It is"}]


@pytest.mark.parametrize(
    ("item", "named"),
    [
        ({"role": "user", "content": [{"type": "input_image"}]}, "'input_image'"),
        ({"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_file"}]}, "'input_file'"),
    ],
)
async def test_other_parts_are_refused_by_their_type(llm: LLM, item: dict[str, Any], named: str) -> None:
    async with served(llm) as client:
        answer = await client.post("/v1/responses", json={**BODY, "input": [item]})
        assert answer.status_code == 400, answer.text
        assert f".0: parts of type {named} are not supported" in answer.json()["error"]["message"]
        assert ";" not in answer.json()["error"]["message"]
