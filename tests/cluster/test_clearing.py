"""Clearing the caches behind an ingress: on all replicas, those that leave included, and for good."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing

import httpx
import pytest
from support.pretended_replicas import (
    GREEDY,
    HANGING,
    Cluster,
    answering,
    line,
    llm_of,
    streaming,
    until,
)

from radixkv import BeamSearchParams, SamplingParams
from radixkv.engine.clearing import ALL_NAMESPACES, Cleared, NamespaceSelection
from radixkv.errors import ReplicasLostError
from radixkv.prompts import Prompt
from radixkv.routing import prompt_hashes


async def test_clearing_is_no_success_where_a_replica_does_not_confirm_it() -> None:
    cluster = Cluster()
    replicas = await cluster.up("a")
    await replicas.add("b", "http://broken")
    with pytest.raises(ReplicasLostError, match="replicas that are down, or did not do it: 'b'"):
        await llm_of(replicas).clear(ALL_NAMESPACES)
    await replicas.remove("b")
    cluster.hung.add("http://a")
    await until(lambda: not replicas.available)
    with pytest.raises(ReplicasLostError, match="or did not do it: 'a'"):  # it may come back with all that it holds
        await llm_of(replicas).clear(ALL_NAMESPACES)
    await replicas.close()


async def test_a_replica_that_has_left_the_list_is_cleared_while_it_finishes_its_streams() -> None:
    """It was not asked: when it ended, it wrote what had been cleared into the tiers that it shared with others."""
    cluster = Cluster()
    cleared = Cleared(namespaces=1, freed_blocks=2, blocks_in_use=3, cached_blocks=4)
    refusing = set[str]()

    async def body() -> AsyncIterator[bytes]:
        yield line(1)
        await asyncio.Event().wait()

    async def clear(request: httpx.Request) -> httpx.Response:
        return httpx.Response(500 if request.url.host in refusing else 200, json=cleared._asdict())

    cluster.answers |= {"/generate": streaming(body), "/clear": clear}
    cluster.identities["http://a"] = {"weights": "old"}  # so that no other replica goes on with its streams
    replicas = await cluster.up("a")
    async with aclosing(replicas.streams.generate(Prompt([1, 2, 3]), GREEDY, "one")) as stream:
        await anext(stream)
        await replicas.add("b", "http://b")
        llm = llm_of(replicas)
        removal = asyncio.ensure_future(replicas.remove("a"))
        await until(lambda: replicas.names == ["b"])
        assert await llm.clear(ALL_NAMESPACES) == Cleared(1, 4, 6, 8)
        refusing.add("a")
        with pytest.raises(ReplicasLostError, match="or did not do it: 'a at http://a'; ask again"):
            await llm.clear(ALL_NAMESPACES)
    await asyncio.wait_for(removal, HANGING)
    assert await llm.clear(ALL_NAMESPACES) == cleared
    await replicas.close()


@pytest.mark.parametrize(("cleared", "cached"), [("secret", False), ("other", True)])
@pytest.mark.parametrize("params", [GREEDY, BeamSearchParams(2, 10)])
async def test_a_prompt_that_was_cleared_is_not_cached_again_where_it_goes_on(
    cleared: str, cached: bool, params: SamplingParams | BeamSearchParams
) -> None:
    """A tenant's prompt was back in a cache, and in tiers, after the tenant had been cleared."""
    cluster, sent, dies = Cluster(), list[bool](), asyncio.Event()

    async def answer() -> AsyncIterator[bytes]:
        if len(sent) == 1:
            await dies.wait()
            raise httpx.ReadError("planted")
        await asyncio.Event().wait()
        yield b""

    async def generate(request: httpx.Request) -> httpx.Response:
        sent.append(json.loads(await request.aread())["write_cache"])
        return await streaming(answer)(request)

    cluster.answers |= {"/generate": generate, "/health": answering()}
    replicas = await cluster.up(*"ab")
    llm = llm_of(replicas)
    await llm.submit([Prompt(list(range(17)), namespace="secret/salt")], params)
    (first,) = (name for name in "ab" if replicas.streams.num_streams(name))
    await llm.clear(NamespaceSelection(cleared))
    dies.set()
    await until(lambda: len(sent) == 2)
    assert sent == [True, cached]
    assert replicas.router is not None
    replicas.router.remove(first)
    hashes = prompt_hashes(list(range(17)), "secret/salt", 16)
    assert (replicas.router.holder(hashes) is not None) is cached  # or it would be sent there again
    await llm.shutdown()
    await replicas.close()


async def test_clearing_succeeds_at_any_moment_of_the_removal_of_a_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    """The removal closed the connection over which the replica was being cleared, and the cluster answered 503."""
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_LOOKS", 0.0)

    async def clear_after(num_ticks: int) -> bool:
        """Whether the replica was gone by then."""
        cluster, num_cleared = Cluster(), 0

        async def clear(request: httpx.Request) -> httpx.Response:
            nonlocal num_cleared
            for _ in range(50):
                await asyncio.sleep(0)
            if any(client.is_closed for client in cluster.made if client.base_url.host == request.url.host):
                raise httpx.ReadError("its connection was closed")
            num_cleared += 1
            return httpx.Response(200, json=Cleared(1, 0, 0, 0)._asdict())

        cluster.answers["/clear"] = clear
        replicas = await cluster.up(*"ab")
        removal = asyncio.ensure_future(replicas.remove("a"))
        for _ in range(num_ticks):
            await asyncio.sleep(0)
        await llm_of(replicas).clear(ALL_NAMESPACES)
        await removal
        await replicas.close()
        return num_cleared == 1

    num_ticks = 0
    while not await clear_after(num_ticks):
        num_ticks += 1
    assert num_ticks > 8  # looks, see `_LOOKS_TO_REPORT`
