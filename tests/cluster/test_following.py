"""A replica is followed by its events: when it is up, when it is down, and what the log says of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import httpx
import pytest
from support.pretended_replicas import LOAD, Cluster, Handler, answering, load_record, streaming, until
from support.time_limit import HANGING

from radixkv.cluster.records import Kind, encode_load, encode_record
from radixkv.scheduling.tenant_share import TenantShare

UP = encode_record(Kind.HELD) + encode_load(LOAD)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_ATTEMPTS", 0.0)


async def unavailable(request: httpx.Request) -> httpx.Response:
    return httpx.Response(503)


async def unreachable(request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectTimeout("planted")


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        (unavailable, "503 Service Unavailable"),
        (answering(), "expected events, and they ended"),
        (answering(encode_record(Kind.CLEARED)), "expected HELD as its first record, got CLEARED"),
    ],
    ids=["an error", "none", "others first"],
)
async def test_a_replica_that_does_not_say_what_it_holds_is_not_up(events: Handler, expected: str) -> None:
    cluster = Cluster()
    cluster.answers["/events"] = events
    replicas = cluster.replicas()
    with pytest.raises(ConnectionError, match=expected):
        await replicas.add("a", "http://a")
    await replicas.close()


@pytest.mark.parametrize("later", [unavailable, unreachable])
async def test_a_replica_whose_events_cannot_be_read_again_is_down(later: Handler) -> None:
    cluster, may_end = Cluster(), asyncio.Event()

    async def records() -> AsyncIterator[bytes]:
        yield UP
        await may_end.wait()
        cluster.answers["/events"] = later

    cluster.answers["/events"] = streaming(records)
    replicas = await cluster.up("a")
    assert replicas.loads == {"a": LOAD}
    may_end.set()
    await until(lambda: not replicas.available)
    assert replicas.loads == {}
    await replicas.close()


async def test_whatever_comes_from_a_replica_breaks_its_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = list[float]()

    @asynccontextmanager
    async def noted(seconds: float) -> AsyncIterator[Callable[[], None]]:
        yield lambda: limits.append(seconds)

    monkeypatch.setattr("radixkv.cluster.replica_set.idle_timeout", noted)
    cluster = Cluster()
    cluster.events["http://a"] = [UP, encode_load(LOAD), encode_load(LOAD)]
    replicas = await cluster.up("a")
    await until(lambda: len(limits) == 3)
    await replicas.close()
    assert limits == [10.0] * 3


async def test_a_replica_s_speed_reaches_the_router() -> None:
    cluster = Cluster()
    cluster.events["http://a"] = [encode_record(Kind.HELD), load_record(prefill_seconds_per_token=0.25)]
    replicas = await cluster.up("a")
    assert replicas.streams.router._replicas["a"].seconds_per_token == 0.25
    await replicas.close()


async def test_what_keeps_a_replica_down_is_logged_once_each_time_that_it_is_down(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cluster, may_end = Cluster(), asyncio.Event()

    async def records() -> AsyncIterator[bytes]:
        yield UP
        await may_end.wait()
        cluster.identities["http://a"] = {"version": "another"}

    cluster.answers["/events"] = streaming(records)
    replicas = await cluster.up("a")
    for _ in range(2):
        num_made = len(cluster.made)
        may_end.set()
        await until(lambda expected=num_made + 3: len(cluster.made) >= expected)
        may_end.clear()
        cluster.identities.clear()
        await until(lambda: replicas.available)
    await replicas.close()
    assert sum("runs RadixKV another" in message for message in caplog.messages) == 2


async def test_a_replica_that_cannot_be_followed_is_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    cluster.events["http://a"] = [UP, encode_record(Kind.LOAD, b"{")]
    replicas = await cluster.up("a")
    await until(lambda: len(cluster.made) > 3)
    await replicas.close()
    assert sum("replica 'a' cannot be followed" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("closes", [True, False], ids=["a closed set", "a replica that is down"])
async def test_setting_shares_ends_when_a_replica_is_lost_or_the_set_is_closed(closes: bool) -> None:
    cluster, asked = Cluster(), asyncio.Event()

    async def confirm(request: httpx.Request) -> httpx.Response:
        asked.set()
        return await asyncio.Future()

    cluster.answers["/tenants"] = confirm
    replicas = await cluster.up("a")
    setting = asyncio.ensure_future(replicas.set_tenants({"ann": TenantShare()}))
    await asked.wait()
    if closes:
        await replicas.close()
    else:
        cluster.hung.add("http://a")
    await asyncio.wait_for(setting, HANGING)
    assert replicas.available == []
    await replicas.close()
    assert replicas.names == []
