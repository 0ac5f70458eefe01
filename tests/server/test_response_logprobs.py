"""Log-probabilities in `/v1/responses`: of the tokens of each message's text, whole and in events."""

from __future__ import annotations

from typing import Any

import pytest
from support.in_process_server import served
from support.named_events import named_events
from support.response_requests import BODY, EVENT, create

from radixkv import LLM
from radixkv.server.output import response_size
from radixkv.server.responses.store import ResponseStore

INCLUDED: dict[str, Any] = {"include": ["message.output_text.logprobs"]}


async def test_log_probabilities_are_those_of_the_chat(llm: LLM) -> None:
    async with served(llm) as client:
        messages = [{"role": "user", "content": BODY["input"]}]
        fields = {"max_tokens": 12, "temperature": 0, "logprobs": True, "top_logprobs": 2}
        chat = await client.post("/v1/chat/completions", json={"messages": messages, **fields})
        expected = chat.json()["choices"][0]["logprobs"]["content"]
        whole = await create(client, **INCLUDED, top_logprobs=2)
        (part,) = whole["output"][0]["content"]
        assert part["logprobs"] == expected
        assert (len(expected), whole["top_logprobs"]) == (12, 2)
        assert (await client.get(f"/v1/responses/{whole['id']}")).json() == whole

        answer = await client.post("/v1/responses", json={**BODY, **INCLUDED, "top_logprobs": 2, "stream": True})
        events = named_events(answer.text)
        for event in events:
            EVENT.validate_python(event)
        by_type = {event["type"].removeprefix("response."): event for event in events}
        deltas = [event for event in events if event["type"] == "response.output_text.delta"]
        assert [entry for event in deltas for entry in event["logprobs"]] == expected
        assert by_type["content_part.added"]["part"]["logprobs"] == []
        for part in (
            by_type["output_text.done"],
            by_type["content_part.done"]["part"],
            by_type["output_item.done"]["item"]["content"][0],
            by_type["incomplete"]["response"]["output"][0]["content"][0],
        ):
            assert part["logprobs"] == expected

        # The chosen ones alone, and none where they are not included.
        alone = (await create(client, **INCLUDED))["output"][0]["content"][0]["logprobs"]
        assert alone == [{**entry, "top_logprobs": []} for entry in expected]
        without = await create(client, top_logprobs=2)
        assert (without["output"][0]["content"][0]["logprobs"], without["top_logprobs"]) == ([], 2)
        # What was returned can be named, listed, and sent again.
        item = whole["output"][0]
        for sent in ({"type": "item_reference", "id": item["id"]}, item):
            again = await create(client, input=[sent, {"role": "user", "content": "And?"}])
            listed = (await client.get(f"/v1/responses/{again['id']}/input_items")).json()["data"]
            assert listed[1]["content"] == [{"type": "output_text", "text": part["text"], "annotations": []}]


async def test_what_continues_a_response_does_not_count_for_its_log_probabilities(llm: LLM) -> None:
    """It has none of them, so that a conversation could not be continued long before it took as much."""
    async with served(llm, responses=ResponseStore(max_bytes=36_000)) as client:
        first = await create(client, **INCLUDED, top_logprobs=20)
        second = await create(client, **INCLUDED, top_logprobs=20, previous_response_id=first["id"])
        assert len((await client.get(f"/v1/responses/{second['id']}")).content) > 15_000
        assert (await client.get(f"/v1/responses/{first['id']}")).status_code == 404  # displaced
        assert await create(client, previous_response_id=second["id"])


@pytest.mark.parametrize("stream", [False, True])
async def test_more_than_a_response_may_hold_are_refused(
    llm: LLM, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also in a stream, the last event of which holds them all; but the error advised to stream."""
    monkeypatch.setattr(response_size, "MAX_RETURNED_LOGPROBS", 35)
    async with served(llm) as client:
        answer = await client.post("/v1/responses", json={**BODY, **INCLUDED, "top_logprobs": 2, "stream": stream})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "include")
        assert error["message"].endswith("; ask for fewer tokens, choices or prompts")
