"""Items that a request to `/v1/responses` names by their ids, and the tokens that its prompt has."""

from __future__ import annotations

from typing import Any

from openai.types.responses.input_token_count_response import InputTokenCountResponse
from support.in_process_server import served
from support.response_requests import BODY, create
from support.tenant_keys import bearer

from radixkv import LLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.responses.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputReasoning,
    ReasoningTextPart,
    ResponseObject,
)
from radixkv.server.responses.references import with_referenced_items
from radixkv.server.responses.request import InputTokensRequest
from radixkv.server.responses.store import ResponseStore
from radixkv.server.responses.translation import input_messages

QUESTION = {"role": "user", "content": "Name three colours."}
NEXT = {"role": "user", "content": "Which is the darkest?"}


def reference(response: dict[str, Any]) -> dict[str, Any]:
    return {"type": "item_reference", "id": response["output"][0]["id"]}


async def test_an_item_that_is_named_is_read_as_if_it_were_sent(llm: LLM) -> None:
    """Vercel's AI SDK sends text and reasoning of earlier answers so, unless it is configured that nothing is stored."""
    async with served(llm) as client:
        first = await create(client)
        named, sent = [
            await create(client, input=[QUESTION, item, NEXT]) for item in (reference(first), first["output"][0])
        ]
        assert named["output"][0]["content"] == sent["output"][0]["content"]
        assert named["usage"]["input_tokens"] == sent["usage"]["input_tokens"]
        assert named["usage"]["input_tokens_details"]["cached_tokens"] >= first["usage"]["input_tokens"]
        again = await create(client, input="And?", previous_response_id=named["id"])
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= named["usage"]["input_tokens"]


def test_calls_and_reasoning_can_be_named_too() -> None:
    output: list[OutputItem] = [
        OutputReasoning(id="rs_1", status="completed", content=[ReasoningTextPart(text="Hm.")]),
        OutputFunctionCall(id="fc_1", status="completed", call_id="c1", name="f", arguments="{}"),
    ]
    store = ResponseStore()
    pending = store.begin("ann", None, "namespace", [], [])
    store.finish(pending, ResponseObject.model_construct(id="resp_1", output=output), [], 1)
    items = [QUESTION, *({"type": "item_reference", "id": item.id} for item in output)]
    body, sources = with_referenced_items(InputTokensRequest.model_validate({"input": items}), store, "ann", None)
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    assert input_messages(body.input) == [
        QUESTION,
        {"role": "assistant", "reasoning_content": "Hm.", "content": None, "tool_calls": [call]},
    ]
    assert [source.response.id for source in sources] == ["resp_1", "resp_1"]
    store.remove("ann", "resp_1")
    assert store.item("ann", "fc_1") is None


async def test_what_is_not_stored_for_the_client_or_named_twice_is_refused(llm: LLM) -> None:
    """Named a thousand times, a stored text would be a thousand times as long a prompt."""
    async with served(llm, tenants=Tenants(["ann", "bob"])) as client:

        async def error(key: str, *items: dict[str, Any]) -> tuple[int, str]:
            answer = await client.post("/v1/responses", json={**BODY, "input": [*items]}, headers=bearer(key))
            assert answer.json()["error"]["param"] == "input"
            return answer.status_code, answer.json()["error"]["message"]

        stored, unstored = [
            (await client.post("/v1/responses", json={**BODY, **fields}, headers=bearer("ann"))).json()
            for fields in ({}, {"store": False})
        ]
        item = reference(stored)
        missing = f"input.1.id: no item {item['id']!r} is stored: "
        twice = f"input.1.id: expected each item once, got {item['id']!r} twice"
        whole = stored["output"][0]
        for repeated in ((item, item), (whole, item), (item, whole)):
            assert await error("ann", *repeated) == (400, twice)
        status, message = await error("bob", QUESTION, item)
        assert (status, message.startswith(missing)) == (404, True)
        assert (await error("ann", reference(unstored)))[0] == 404
        await client.delete(f"/v1/responses/{stored['id']}", headers=bearer("ann"))
        assert (await error("ann", item))[0] == 404


async def test_what_the_continued_conversation_holds_cannot_be_named_or_sent_again(llm: LLM) -> None:
    """An answer was written twice into one message, and calls were doubled. (OpenAI: "Duplicate item found with id".)"""
    async with served(llm) as client:
        first, other = await create(client), await create(client)
        second = await create(client, input=[NEXT, reference(other)], previous_response_id=first["id"])
        third = await create(client, input="And?", previous_response_id=second["id"])
        await client.delete(f"/v1/responses/{second['id']}")
        ends = [response["output"][0] for response in (first, other, second, third)]
        for item in [*map(reference, (first, other, second, third)), *ends]:
            body = {"input": [NEXT, item], "previous_response_id": third["id"]}
            for path in ("", "/input_tokens"):
                refused = await client.post(f"/v1/responses{path}", json=body)
                assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input"), refused.text
                assert refused.json()["error"]["message"] == (
                    f"input.1.id: expected each item once, got {item['id']!r}, which previous_response_id brings"
                )
        for item in (reference(third), ends[-1], {**ends[0], "id": None}, {**NEXT, "id": ""}):
            await create(client, input=[item], previous_response_id=first["id"])


async def test_what_names_an_item_is_forgotten_with_the_salt_that_the_item_came_from(llm: LLM) -> None:
    async with served(llm, tenants=Tenants(["ann"], "admin")) as client:
        client.headers.update(bearer("ann"))
        first = await create(client, cache_salt="a", max_output_tokens=1)
        second = await create(client, cache_salt="b", max_output_tokens=1, input=[QUESTION, reference(first), NEXT])
        cleared = await client.post(
            "/admin/clear_cache", json={"api_key": "ann", "cache_salt": "a"}, headers=bearer("admin")
        )
        assert cleared.status_code == 200, cleared.text
        assert (await client.get(f"/v1/responses/{second['id']}")).status_code == 404


async def test_the_tokens_of_a_prompt_are_counted(llm: LLM) -> None:
    async with served(llm) as client:
        tools = [{"type": "function", "name": "weather", "parameters": {"type": "object"}}]
        first = await create(client)
        for fields in (
            {"input": BODY["input"]},
            {"input": BODY["input"], "instructions": "Be brief.", "tools": tools, "tool_choice": "auto"},
            {"input": "And?", "previous_response_id": first["id"]},
            {"input": [QUESTION, reference(first), NEXT], "truncation": "disabled", "conversation": None},
        ):
            counted = await client.post("/v1/responses/input_tokens", json=fields)
            assert counted.status_code == 200, counted.text
            count = InputTokenCountResponse.model_validate(counted.json())
            assert count.input_tokens == (await create(client, **fields))["usage"]["input_tokens"]
        for fields, status, param in (
            ({"input": []}, 400, "input"),
            ({"input": "Hi", "model": "other"}, 404, "model"),
            ({"input": "Hi", "previous_response_id": "resp_1"}, 404, "previous_response_id"),
            ({"input": "Hi", "truncation": "left"}, 400, "truncation"),
            ({"input": "Hi", "tool_choice": "required"}, 400, "tool_choice"),
        ):
            refused = await client.post("/v1/responses/input_tokens", json=fields)
            assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text
