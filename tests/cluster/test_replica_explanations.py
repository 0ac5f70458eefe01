"""Explanations and the administrator's pins over several caches."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from support.pretended_replicas import until
from support.replica_servers import LocalReplica, ingress_client, local_replicas, tiny_llm

from radixkv import AsyncLLM
from radixkv.cache import Pin
from radixkv.cluster import ReplicaSet
from radixkv.cluster.replica_explanations import explain_by_replicas
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt

PROMPT = "You are the assistant of a small public library. Answer in one sentence. " * 4
OTHER = "Red, green, blue, yellow, black, white, orange, purple, brown, grey, pink. " * 4
ONE_TOKEN = {"max_tokens": 1, "temperature": 0}
Check = Callable[[httpx.AsyncClient, ReplicaSet, list[LocalReplica]], Awaitable[None]]


def over_two(check: Check, tokenizer: Any, folder: Path, num_blocks: int = 300) -> None:
    """Run a check over an ingress with two replicas."""

    async def main() -> None:
        llms = [tiny_llm(tokenizer, num_blocks=num_blocks) for _ in range(2)]
        async with (
            local_replicas(folder, *llms, wait_seconds=0.0) as (replicas, servers),
            ingress_client(replicas, tokenizer) as client,
        ):
            client.headers["Authorization"] = "Bearer admin"
            await check(client, replicas, servers)

    asyncio.run(main())


async def complete(client: httpx.AsyncClient, prompt: str, **options: object) -> dict[str, Any]:
    answer = await client.post("/v1/completions", json={"prompt": prompt, **ONE_TOKEN, **options})
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def pinned_blocks(servers: list[LocalReplica]) -> list[int]:
    return [
        sum(pin.num_tokens for pin in await server.llm.call(lambda engine: list(engine.cache.pins()))) // 16
        for server in servers
    ]


def test_the_replica_that_has_most_of_a_prompt_explains_it(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        await complete(client, PROMPT + "Today is Monday.")
        (holder,) = [name for name, server in zip("01", servers, strict=True) if server.llm.stats.num_evictable_blocks]
        answer = await complete(client, PROMPT + "Today is Tuesday.", explain_cache=True)
        (explanation,) = answer["cache_explanations"]
        assert explanation["replica"] == holder
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert explanation["num_reused_tokens"] == cached > 50
        assert f"prompt tokens are reused on replica '{holder}'" in explanation["text"]
        assert "Monday" in "".join(explanation["difference"]["cached"])
        (of_none,) = (await complete(client, OTHER, explain_cache=True))["cache_explanations"]
        assert of_none["num_reused_tokens"] == 0
        too_many = {"prompt": [[5, 6, 7]] * 17, "explain_cache": True, **ONE_TOKEN}
        assert (await client.post("/v1/completions", json=too_many)).json()["error"]["param"] == "explain_cache"

    over_two(check, default_tokenizer, tmp_path)


def test_an_explanation_needs_one_replica_that_answers(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        await complete(client, PROMPT)
        (before,) = (await complete(client, PROMPT, explain_cache=True))["cache_explanations"]
        await servers[int(before["replica"])].kill()
        (after,) = (await complete(client, PROMPT, explain_cache=True))["cache_explanations"]
        assert after["replica"] != before["replica"]
        assert after["num_reused_tokens"] == 0
        await servers[int(after["replica"])].kill()
        refused = await client.post("/v1/completions", json={"prompt": PROMPT, "explain_cache": True, **ONE_TOKEN})
        assert refused.status_code == 503

    over_two(check, default_tokenizer, tmp_path)


def test_a_pin_is_on_the_replica_that_has_the_prompt(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        await complete(client, PROMPT)
        (where,) = (await complete(client, PROMPT, explain_cache=True))["cache_explanations"]
        pin = (await client.post("/admin/pins", json={"prompt": PROMPT, "ttl": 3600})).json()
        assert pin["replica"] == where["replica"]
        assert pin["active"]
        assert pin["expires_in"] == 3600
        assert (await pinned_blocks(servers))[int(pin["replica"])] == pin["tokens"] // 16 == 3
        unknown = (await client.post("/admin/pins", json={"prompt": OTHER})).json()
        assert unknown["tokens"] > 48
        listed = (await client.get("/admin/pins")).json()["pins"]
        assert {(one["id"], one["replica"]) for one in listed} == {
            (one["id"], one["replica"]) for one in (pin, unknown)
        }
        used = await complete(client, OTHER)
        assert used["usage"]["prompt_tokens_details"]["cached_tokens"] >= unknown["tokens"]
        left = (await client.delete(f"/admin/pins/{pin['id']}")).json()["pins"]
        assert [one["id"] for one in left] == [unknown["id"]]
        assert (await client.delete(f"/admin/pins/{pin['id']}")).status_code == 404
        assert sum(await pinned_blocks(servers)) == unknown["tokens"] // 16

    over_two(check, default_tokenizer, tmp_path)


def test_pins_that_cannot_be_are_refused_as_by_one_engine(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        too_many = await client.post("/admin/pins", json={"prompt": OTHER})
        assert too_many.status_code == 409
        assert too_many.json()["error"]["param"] == "prompt"
        for prompt in (PROMPT * 2, PROMPT * 40):
            too_long = await client.post("/admin/pins", json={"prompt": prompt})
            assert too_long.status_code == 400
            assert too_long.json()["error"]["code"] == "context_length_exceeded"
        assert (await client.get("/admin/pins")).json() == {"pins": []}
        assert await pinned_blocks(servers) == [0, 0]

    over_two(check, default_tokenizer, tmp_path, num_blocks=6)


def test_a_prompt_that_is_cleared_while_it_is_pinned_is_a_conflict(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        async def pin_and_clear(engine: AsyncLLM, prompt: Prompt, ttl: float | None) -> Pin:
            made = await AsyncLLM.pin_prompt(engine, prompt, ttl)
            await engine.reset_prefix_cache()
            return made

        for server in servers:
            server.llm.pin_prompt = partial(pin_and_clear, server.llm)  # type: ignore[method-assign]
        cleared = await client.post("/admin/pins", json={"prompt": PROMPT})
        assert (cleared.status_code, cleared.json()["error"]["param"]) == (409, "prompt")

    over_two(check, default_tokenizer, tmp_path)


@pytest.mark.parametrize("method", ["GET", "DELETE"])
def test_pins_are_not_listed_while_a_replica_does_not_answer(
    method: str, default_tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        async def silent() -> None:
            raise RuntimeError

        monkeypatch.setattr(servers[1].llm, "call", lambda function: silent())
        refused = await client.request(method, "/admin/pins" if method == "GET" else "/admin/pins/none")
        assert refused.status_code == 503
        assert "'1'" in refused.json()["error"]["message"]

    over_two(check, default_tokenizer, tmp_path)


def test_pins_on_a_replica_that_is_down_are_neither_listed_nor_released(default_tokenizer: Any, tmp_path: Path) -> None:
    async def check(client: httpx.AsyncClient, replicas: ReplicaSet, servers: list[LocalReplica]) -> None:
        pinned = (await client.post("/admin/pins", json={"prompt": PROMPT})).json()
        where = int(pinned["replica"])
        await servers[where].kill()
        await until(lambda: str(where) not in replicas.available)
        for method, path in [("GET", "/admin/pins"), ("DELETE", f"/admin/pins/{pinned['id']}")]:
            refused = await client.request(method, path)
            assert (refused.status_code, f"'{where}'" in refused.json()["error"]["message"]) == (503, True)
        await servers[where].start()
        await until(lambda: str(where) in replicas.available)
        assert (await client.delete(f"/admin/pins/{pinned['id']}")).status_code == 200

    over_two(check, default_tokenizer, tmp_path)


RIGHT = {
    "num_prompt_tokens": 9,
    "num_reused_tokens": 4,
    "computed": [],
    "difference": None,
    "below": [],
    "replica": None,
}


class Replicas:
    """Replicas whose answers are given."""

    def __init__(self, answers: dict[str, httpx.Response | None]) -> None:
        self._answers = answers

    async def ask_all(self, method: str, path: str, content: bytes) -> dict[str, httpx.Response | None]:
        return self._answers


def explained(**answers: Any) -> list[str | None]:
    """The replica that explains each of two prompts, when the replicas' answers are these."""
    responses = {
        name: None if answer is None else httpx.Response(200, content=answer) for name, answer in answers.items()
    }
    prompts = [Prompt(token_ids=[1, 2, 3])] * 2
    replicas = cast(ReplicaSet, Replicas(responses))
    return [each.replica for each in asyncio.run(explain_by_replicas(replicas, prompts, ""))]


def of(*explanations: dict[str, Any]) -> bytes:
    return httpx.Response(200, json=list(explanations)).content


MALFORMED = {
    "no JSON": b"<html>",
    "a number": b"5",
    "no explanations": b"[5, 5]",
    "a field less": of(RIGHT, {name: RIGHT[name] for name in RIGHT if name != "below"}),
    "one prompt": of(RIGHT),
}


@pytest.mark.parametrize("malformed", MALFORMED.values(), ids=MALFORMED)
def test_a_malformed_explanation_is_left_out(malformed: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """It used to lose all others' explanations."""
    best = {**RIGHT, "num_reused_tokens": 8}
    with caplog.at_level(logging.WARNING):
        assert explained(a=of(RIGHT, best), b=malformed, c=of(best, RIGHT), d=None) == ["c", "a"]
    assert "replica 'b'" in caplog.text
    with pytest.raises(ReplicasLostError, match="no replica explained the prompts"):
        explained(b=malformed, d=None)
