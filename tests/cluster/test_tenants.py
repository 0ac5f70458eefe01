"""What tenants may have reaches every replica: one that joins, hangs, is started anew, or did not confirm it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator

import httpx
import pytest
from support.pretended_replicas import CAPACITY, IDENTITY, LOAD, Cluster, streaming, until

from radixkv.cluster import replica_set
from radixkv.cluster.records import Kind, encode_load, encode_record
from radixkv.cluster.wire import encode_shares
from radixkv.scheduling.tenant_share import TenantShare


async def test_what_tenants_may_have_reaches_a_replica_that_joins_meanwhile() -> None:
    cluster, received = Cluster(), list[bytes]()
    may_be_up = asyncio.Event()

    async def receive(request: httpx.Request) -> httpx.Response:
        received.append(request.content)
        return httpx.Response(200)

    async def body() -> AsyncIterator[bytes]:
        await may_be_up.wait()
        yield encode_record(Kind.HELD) + encode_load(LOAD)
        await asyncio.Event().wait()

    cluster.answers |= {"/tenants": receive, "/events": streaming(body)}
    replicas = cluster.replicas()
    shares = [{"ann": TenantShare(max_num_seqs=count)} for count in (2, 3)]
    await replicas.set_tenants(shares[0])
    adding = asyncio.ensure_future(replicas.add("a", "http://a"))
    await until(lambda: received)
    await replicas.set_tenants(shares[1])  # it is not up, and not asked
    may_be_up.set()
    await adding
    assert received == [encode_shares(each) for each in shares]
    await replicas.close()


async def test_what_tenants_may_have_is_sent_again_to_a_replica_that_did_not_confirm_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its answer used to be ignored: after one lost request it kept the old limits."""
    with caplog.at_level(logging.WARNING):
        cluster, received = Cluster(), list[bytes]()
        num_loads = 0

        async def receive(request: httpx.Request) -> httpx.Response:
            received.append(request.content)
            if len(received) == 1:
                raise httpx.ReadError("planted")
            return httpx.Response(500 if len(received) == 2 else 200)

        async def body() -> AsyncIterator[bytes]:
            nonlocal num_loads
            yield encode_record(Kind.HELD)
            while True:
                yield encode_load(LOAD)
                num_loads += 1
                await asyncio.sleep(0)

        cluster.answers |= {"/tenants": receive, "/events": streaming(body)}
        replicas = await cluster.up("a")
        shares = {"ann": TenantShare(max_num_seqs=2)}
        await replicas.set_tenants(shares)
        assert "sending tenants' shares to replica 'a' failed, and is tried again: ReadError('planted')" in caplog.text
        await until(lambda: len(received) == 3)
        confirmed = num_loads
        await until(lambda: num_loads > confirmed + 10)
        await replicas.close()
        assert received == [encode_shares(shares)] * 3
        assert len(caplog.records) == 1


async def test_a_replica_that_was_started_anew_before_it_was_up_gets_the_tenants_shares(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that confirmed it and died before it was up used to be taken for its successor, which got nothing."""
    monkeypatch.setattr(replica_set, "_SECONDS_BETWEEN_ATTEMPTS", 0.0)
    with caplog.at_level(logging.INFO, "radixkv"):
        cluster, received = Cluster(), list[int]()
        instance = 0
        may_end = asyncio.Event()

        async def describe(request: httpx.Request) -> httpx.Response:
            described = {"instance": f"instance {instance}", "age": 0.0, "chat_template": None}
            return httpx.Response(200, json={**described, "identity": IDENTITY, "capacity": CAPACITY})

        async def receive(request: httpx.Request) -> httpx.Response:
            received.append(instance)
            return httpx.Response(200)

        async def events() -> AsyncIterator[bytes]:
            nonlocal instance
            if instance != 1:
                yield encode_record(Kind.HELD) + encode_load(LOAD)
            if instance == 2:
                await asyncio.Event().wait()
            await may_end.wait()
            instance += 1
            raise httpx.ReadError("it died")

        cluster.answers |= {"/description": describe, "/tenants": receive, "/events": streaming(events)}
        replicas = cluster.replicas()
        await replicas.set_tenants({"ann": TenantShare(max_num_seqs=1)})
        await replicas.add("a", "http://a")
        may_end.set()
        await until(lambda: instance == 2 and replicas.available == ["a"])
        await replicas.close()
        assert received == [0, 1, 2]
    ups_and_downs = [message for message in caplog.messages if " is " in message]
    assert ups_and_downs == [f"replica 'a' is {state}" for state in ("up at http://a", "down", "up at http://a")]


async def test_what_tenants_may_have_is_not_overtaken() -> None:
    cluster, received = Cluster(), list[bytes]()
    confirms = asyncio.Event()

    async def receive(request: httpx.Request) -> httpx.Response:
        received.append(request.content)
        await confirms.wait()
        return httpx.Response(200)

    cluster.answers["/tenants"] = receive
    replicas = await cluster.up("a")
    shares = [{"ann": TenantShare(max_num_seqs=count)} for count in (1, 2, 3)]
    setting = [asyncio.ensure_future(replicas.set_tenants(each)) for each in shares]
    await until(lambda: received)
    assert len(received) == 1
    confirms.set()
    await asyncio.gather(*setting)
    assert len(received) <= 2
    assert received[-1] == encode_shares(shares[-1])
    await replicas.close()


async def test_a_replica_that_hangs_keeps_no_other_from_what_tenants_may_have() -> None:
    cluster, received = Cluster(), list[tuple[str, bytes]]()
    confirms = asyncio.Event()

    async def receive(request: httpx.Request) -> httpx.Response:
        received.append((request.url.host, request.content))
        if request.url.host == "a":
            await confirms.wait()
        return httpx.Response(200)

    cluster.answers["/tenants"] = receive
    replicas = await cluster.up("a", "b")
    shares = [{"ann": TenantShare(max_num_seqs=count)} for count in (1, 2, 3)]
    setting = [asyncio.ensure_future(replicas.set_tenants(shares[0]))]
    await until(lambda: len(received) == 2)
    setting += [asyncio.ensure_future(replicas.set_tenants(each)) for each in shares[1:]]
    await until(lambda: ("b", encode_shares(shares[2])) in received)
    assert [content for name, content in received if name == "a"] == [encode_shares(shares[0])]
    confirms.set()
    await asyncio.gather(*setting)
    assert received[-1] == ("a", encode_shares(shares[2]))
    await replicas.close()
