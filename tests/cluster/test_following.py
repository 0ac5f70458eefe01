"""What the log says of a replica that stays down, and what is left of a set of replicas that was closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
import pytest
from support.pretended_replicas import LOAD, Cluster, streaming, until
from support.time_limit import HANGING

from radixkv.cluster.records import Kind, encode_load, encode_record
from radixkv.scheduling.tenant_share import TenantShare

UP = encode_record(Kind.HELD) + encode_load(LOAD)


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_ATTEMPTS", 0.0)


def test_what_keeps_a_replica_down_is_said_once_each_time_that_it_is_down(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
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

    asyncio.run(main())
    assert sum("runs RadixKV another" in message for message in caplog.messages) == 2


def test_a_replica_that_cannot_be_followed_is_an_error_once(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.events["http://a"] = [UP, encode_record(Kind.LOAD, b"{")]
        replicas = await cluster.up("a")
        await until(lambda: len(cluster.made) > 3)
        await replicas.close()

    asyncio.run(main())
    assert sum("replica 'a' cannot be followed" in message for message in caplog.messages) == 1


def test_a_closed_set_has_no_replica_and_tells_none_anything() -> None:
    async def main() -> None:
        cluster, asked = Cluster(), asyncio.Event()

        async def confirm(request: httpx.Request) -> httpx.Response:
            asked.set()
            return await asyncio.Future()

        cluster.answers["/tenants"] = confirm
        replicas = await cluster.up("a")
        setting = asyncio.ensure_future(replicas.set_tenants({"ann": TenantShare()}))
        await asked.wait()
        await replicas.close()
        await asyncio.wait_for(setting, HANGING)
        assert replicas.available == replicas.names == []

    asyncio.run(main())
