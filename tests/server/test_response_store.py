"""Stored responses: whose they are, when they are forgotten, and how much they take."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from support.in_process_server import served
from support.replica_servers import tiny_llm
from support.response_requests import BODY, create
from support.tenant_keys import bearer

from radixkv import LLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.responses import routes
from radixkv.server.responses.objects import ResponseObject
from radixkv.server.responses.store import ResponseStore


async def test_stored_responses_are_their_tenant_s_until_deleted(llm: LLM) -> None:
    async with served(llm, tenants=Tenants(["ann", "bob"])) as client:
        ann, bob = bearer("ann"), bearer("bob")

        async def status(method: str, response_id: str, headers: dict[str, str]) -> int:
            return (await client.request(method, f"/v1/responses/{response_id}", headers=headers)).status_code

        stored = (await client.post("/v1/responses", json=BODY, headers=ann)).json()
        fetched = await client.get(f"/v1/responses/{stored['id']}", headers=ann)
        assert fetched.json() == stored
        assert await status("GET", stored["id"], bob) == 404
        assert await status("DELETE", stored["id"], bob) == 404
        continued = await client.post("/v1/responses", json={**BODY, "previous_response_id": stored["id"]}, headers=bob)
        assert continued.status_code == 404
        assert continued.json()["error"]["param"] == "previous_response_id"
        assert await status("DELETE", stored["id"], ann) == 200
        assert await status("GET", stored["id"], ann) == 404
        unstored = (await client.post("/v1/responses", json={**BODY, "store": False}, headers=ann)).json()
        assert await status("GET", unstored["id"], ann) == 404


async def test_stored_responses_are_forgotten_when_an_administrator_clears_what_is_cached(llm: LLM) -> None:
    """Their texts used to stay, although clearing a tenant's cache is to leave nothing of it."""
    async with served(llm, tenants=Tenants(["ann", "bob"], "admin")) as client:

        async def stored(key: str, **options: Any) -> tuple[str, str]:
            body = BODY | {"max_output_tokens": 1} | options
            return key, (await client.post("/v1/responses", json=body, headers=bearer(key))).json()["id"]

        async def left(**selection: Any) -> list[int]:
            cleared = await client.post("/admin/clear_cache", json=selection, headers=bearer("admin"))
            assert cleared.status_code == 200, cleared.text
            answers = [await client.get(f"/v1/responses/{name}", headers=bearer(key)) for key, name in responses]
            return [number for number, answer in enumerate(answers) if answer.status_code == 200]

        responses = [await stored("ann"), await stored("ann", cache_salt="x"), await stored("bob")]
        assert await left(api_key="ann", cache_salt="x") == [0, 2]
        assert await left(api_key="ann") == [2]
        assert await left() == []


async def test_what_continues_a_response_under_another_salt_is_forgotten_with_it(llm: LLM) -> None:
    """It holds the earlier texts, which could be read and continued after their salt had been cleared."""
    async with served(llm, tenants=Tenants(["ann"], "admin")) as client:
        client.headers.update(bearer("ann"))
        names: list[str] = []
        for salt in ("a", "b", "c"):
            earlier = {"previous_response_id": names[-1]} if names else {}
            names.append((await create(client, cache_salt=salt, max_output_tokens=1, **earlier))["id"])
        names.append((await create(client, cache_salt="c", max_output_tokens=1))["id"])

        async def left(salt: str) -> list[int]:
            selection = {"api_key": "ann", "cache_salt": salt}
            cleared = await client.post("/admin/clear_cache", json=selection, headers=bearer("admin"))
            assert cleared.status_code == 200, cleared.text
            answers = [await client.get(f"/v1/responses/{name}") for name in names]
            return [number for number, answer in enumerate(answers) if answer.status_code == 200]

        assert await left("b") == [0, 3]
        assert await left("a") == [3]


async def test_a_response_that_runs_while_its_key_is_cleared_is_not_stored(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_chat = routes.start_chat
    async with served(llm, tenants=Tenants(["ann", "bob"], "admin")) as client:

        async def status_after_clearing(key: str) -> int:
            async def start_and_clear(*arguments: Any, **options: Any) -> Any:
                events = await start_chat(*arguments, **options)
                cleared = await client.post("/admin/clear_cache", json={"api_key": key}, headers=bearer("admin"))
                assert cleared.status_code == 200, cleared.text
                return events

            monkeypatch.setattr(routes, "start_chat", start_and_clear)
            name = (await client.post("/v1/responses", json=BODY, headers=bearer("ann"))).json()["id"]
            return (await client.get(f"/v1/responses/{name}", headers=bearer("ann"))).status_code

        assert await status_after_clearing("ann") == 404
        assert await status_after_clearing("bob") == 200


async def test_a_stored_response_counts_for_as_many_bytes_as_its_strings_take(llm: LLM) -> None:
    """It used to count for its number of characters, though a single emoji makes each of them take four bytes."""

    async def status(client: httpx.AsyncClient, text: str) -> int:
        answer = await create(client, input=text)
        return (await client.get(f"/v1/responses/{answer['id']}")).status_code

    async with served(llm, responses=ResponseStore(max_bytes=6000)) as client:
        assert await status(client, "a" * 1000) == 200
        assert await status(client, "a" * 999 + "\N{PARTY POPPER}") == 404


def test_the_store_forgets_the_least_recently_used_of_the_same_tenant() -> None:
    def add(tenant: str, name: str, num_bytes: int) -> None:
        pending = store.begin(tenant, None, "namespace", [], [])
        store.finish(pending, ResponseObject.model_construct(id=name, output=[]), [], num_bytes)

    def kept(tenant: str) -> set[str]:
        return {name for name in "abcdefgh" if store.get(tenant, name) is not None}

    store = ResponseStore(max_responses=3, max_bytes=100, max_total_bytes=250)
    add("other", "h", 100)
    for name in "abc":
        add("tenant", name, 10)
    store.get("tenant", "a")
    add("tenant", "d", 10)
    assert kept("tenant") == {"a", "c", "d"}
    add("tenant", "e", 75)
    assert kept("tenant") == {"c", "d", "e"}
    add("tenant", "f", 101)  # never fits: nothing is forgotten for it
    assert len(kept("tenant")) == 3
    add("tenant", "g", 100)
    assert kept("tenant") == {"g"}
    assert store.remove("tenant", "g")
    assert not store.remove("tenant", "g")
    add("tenant", "a", 100)
    assert kept("tenant") == {"a"}
    assert kept("other") == {"h"}
    # A hundred keys could otherwise have a hundred times as much: those of the one with the most are dropped.
    for name in "bcd":
        add("modest", name, 20)
    assert (kept("modest"), kept("tenant") | kept("other")) == ({"b", "c", "d"}, {"a"})


async def test_a_conversation_that_may_be_truncated_drops_its_oldest_turns_a_few_at_a_time(
    default_tokenizer: Any,
) -> None:
    """``truncation`` "auto" was refused. Each turn by itself would leave little of the next prompt in the cache."""
    async with served(tiny_llm(default_tokenizer, max_model_len=1024)) as client:
        options: dict[str, Any] = {"instructions": "You answer briefly. " * 10, "truncation": "auto"}
        previous, lengths, num_dropped = None, [0], 0
        for number in range(34):
            answer = await create(client, input=f"{number}" + " word" * 60, previous_response_id=previous, **options)
            previous, usage = answer["id"], answer["usage"]
            dropped = usage["input_tokens"] < lengths[-1]
            num_dropped += dropped
            assert usage["input_tokens_details"]["cached_tokens"] >= (40 if dropped else lengths[-1] - 1)
            lengths.append(usage["input_tokens"])
        assert 1 <= num_dropped <= 8
        listed = await client.get(f"/v1/responses/{previous}/input_items", params={"order": "asc", "limit": 1})
        assert listed.json()["data"][0]["content"][0]["text"].startswith("0 word")
        for refused in ({"truncation": "disabled"}, {"truncation": "auto", "input": "word " * 1024}):
            answered = await client.post("/v1/responses", json={**BODY, "previous_response_id": previous, **refused})
            assert answered.json()["error"]["code"] == "context_length_exceeded"
