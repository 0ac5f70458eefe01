"""`/v1/responses/{id}/input_items`: what a response was generated from, in pages."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from openai.types.responses import ResponseItem
from openai.types.responses.response_item_list import ResponseItemList
from pydantic import TypeAdapter
from support.in_process_server import served
from support.response_requests import create
from support.server_process import MODEL
from support.tenant_keys import bearer

from radixkv import LLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.responses.input_items import listed_items
from radixkv.server.responses.request import ResponseRequest

ITEM: TypeAdapter[Any] = TypeAdapter(ResponseItem)


def test_openai_s_client_reads_a_conversation_page_by_page(client: openai.OpenAI) -> None:
    options: Any = {"model": MODEL, "max_output_tokens": 4}
    first = client.responses.create(input="One", instructions="Be brief.", **options)
    more: Any = [{"role": "user", "content": str(number), "id": f"msg_{number}"} for number in range(4)]
    second = client.responses.create(input=more, previous_response_id=first.id, **options)
    (answer,) = first.output
    client.responses.delete(first.id)
    listed = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    texts = [item.content[0].text for item in listed]  # type: ignore[union-attr]
    assert texts == ["One", first.output_text, "0", "1", "2", "3"]
    assert [item.id for item in listed[1:]] == [answer.id, *(f"msg_{number}" for number in range(4))]
    assert [item.id for item in client.responses.input_items.list(second.id)] == [item.id for item in listed[::-1]]
    page = client.responses.input_items.list(second.id, after="msg_1", limit=1)
    assert ([item.id for item in page.data], page.has_more) == (["msg_0"], True)
    # What is listed can be sent.
    sent: Any = [item.to_dict() for item in listed]
    again = client.responses.create(input=sent, **options)
    assert again.usage is not None
    assert second.usage is not None
    assert again.usage.input_tokens == second.usage.input_tokens


def test_items_are_listed_in_openai_s_form() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64,iVBORw0KGgo="}
    call = {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}", "async": False}
    items = [
        {
            "role": "developer",
            "content": [{"type": "text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
        {"role": "assistant", "content": "b", "phase": "commentary"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "c"}], "id": "one"},
        {"type": "reasoning", "encrypted_content": "x"},
        {"type": "reasoning", "content": [{"type": "text", "text": "y"}], "id": ""},
        {**call, "status": "incomplete"},
        {"type": "function_call_output", "call_id": "c1", "output": [{"type": "text", "text": "d"}, image]},
        {"type": "function_call_output", "output": "e", "name": "goal", "id": "one"},
    ]
    listed = listed_items(ResponseRequest.model_validate({"input": items}).input)
    shown = [ITEM.validate_json(item).to_dict() for item in listed.values()]
    assert [item["id"] for item in shown] == list(listed)
    prefixes = ["msg", "msg", "one", "rs", "rs", "fc", "fco", "fco"]
    assert [name.partition("_")[0] for name in listed] == prefixes
    assert [{name: value for name, value in item.items() if name != "id"} for item in shown] == [
        {
            "type": "message",
            "role": "developer",
            "status": "completed",
            "content": [{"type": "input_text", "text": "a", "prompt_cache_breakpoint": {"mode": "explicit"}}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "phase": "commentary",
            "content": [{"type": "output_text", "text": "b", "annotations": []}],
        },
        {
            "type": "message",
            "role": "assistant",
            "status": "completed",
            "content": [{"type": "refusal", "refusal": "c"}],
        },
        {"type": "reasoning", "status": "completed", "encrypted_content": "x", "summary": []},
        {
            "type": "reasoning",
            "status": "completed",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": "y"}],
        },
        {"type": "function_call", "status": "incomplete", "call_id": "c1", "name": "f", "arguments": "{}"},
        {
            "type": "function_call_output",
            "status": "completed",
            "call_id": "c1",
            "output": [{"type": "input_text", "text": "d"}, {**image, "detail": "auto"}],
        },
        {"type": "function_call_output", "status": "completed", "output": "e", "name": "goal"},
    ]


@pytest.mark.parametrize(
    ("query", "status", "param"),
    [
        ({"limit": 0}, 400, "limit"),
        ({"limit": 101}, 400, "limit"),
        ({"order": "newest"}, 400, "order"),
        ({"before": "msg_1"}, 400, "before"),
        ({"after": "msg_1"}, 404, "after"),
    ],
)
async def test_impossible_pages_are_refused_by_name(llm: LLM, query: dict[str, Any], status: int, param: str) -> None:
    async with served(llm) as client:
        path = f"/v1/responses/{(await create(client, max_output_tokens=1))['id']}/input_items"
        refused = await client.get(path, params=query)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


async def test_items_are_those_of_the_tenant_and_none_of_what_is_not_stored(llm: LLM) -> None:
    async with served(llm, tenants=Tenants(["ann", "bob"])) as client:
        client.headers.update(bearer("ann"))
        kept, unkept = [
            (await create(client, max_output_tokens=1, **fields))["id"] for fields in ({}, {"store": False})
        ]
        path = f"/v1/responses/{kept}/input_items"
        page = ResponseItemList.model_validate((await client.get(path)).json())
        assert (len(page.data), page.first_id, page.last_id, page.has_more) == (
            1,
            page.data[0].id,
            page.first_id,
            False,
        )
        after = (await client.get(path, params={"after": page.last_id})).json()
        assert after == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
        assert (await client.get(path, headers=bearer("bob"))).status_code == 404
        assert (await client.get(f"/v1/responses/{unkept}/input_items")).status_code == 404
