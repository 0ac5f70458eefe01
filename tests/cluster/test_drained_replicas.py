"""A replica that is drained, and then started again, is in use again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from functools import partial
from unittest.mock import Mock

import httpx
import pytest
from support.pretended_replicas import LOAD, SECRET, Cluster, line, load_record, refusal, streaming, tokens, until
from support.time_limit import HANGING

from radixkv.cluster import ReplicaSet, ReplicaStreams
from radixkv.cluster.membership import Membership
from radixkv.cluster.records import Kind, encode_load, encode_record

RUNNING, DRAINED = encode_load(LOAD), load_record(draining=True)


class Restarting:
    """Events of replicas, of which "a" falls silent when it may, and is started again.

    Args:
        first: the load of "a" until then.
        last: its loads at the end.
    """

    def __init__(self, first: bytes = RUNNING, last: Sequence[bytes] = ()) -> None:
        self.may_end = asyncio.Event()
        self._first, self._last = first, last
        self._is_restarted = False

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        return await streaming(partial(self._records, request.url.host))(request)

    async def _records(self, name: str) -> AsyncIterator[bytes]:
        ends = name == "a" and not self._is_restarted
        yield encode_record(Kind.HELD) + (self._first if ends else RUNNING)
        if ends:
            await self.may_end.wait()
            for load in self._last:
                yield load
                await asyncio.sleep(0)  # its streams are called away, but have not run yet
            self._is_restarted = True
            raise TimeoutError("planted")
        await asyncio.Event().wait()


@pytest.fixture(autouse=True)
def _no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_ATTEMPTS", 0.0)
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_TO_STAY", 0.0)
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_BETWEEN_ATTEMPTS", 0.0)


async def test_a_replica_whose_streams_are_called_away_twice_is_in_use_again(caplog: pytest.LogCaptureFixture) -> None:
    """The second call met a timeout that was expiring, and its error ended the following of the replica, without a word."""
    cluster, events = Cluster(), Restarting(last=[DRAINED, DRAINED])
    cluster.answers["/events"] = events
    replicas = await cluster.up("a")
    reading = asyncio.ensure_future(tokens(replicas.streams))
    await until(lambda: replicas.streams.num_streams("a"))
    await replicas.add("b", "http://b")
    events.may_end.set()
    await until(lambda: cluster.made[0].is_closed and sorted(replicas.available) == ["a", "b"])
    assert replicas.streams.num_streams("b") == 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await replicas.close()
    assert "cannot be followed" not in caplog.text


async def test_replicas_that_are_drained_together_finish_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the first that said so went to the second, which refused them, and were lost after the time to wait."""
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_TO_STAY", HANGING)
    cluster, drained, may_end = Cluster(), set[str](), asyncio.Event()

    async def events(request: httpx.Request) -> httpx.Response:
        async def records() -> AsyncIterator[bytes]:
            yield encode_record(Kind.HELD) + RUNNING
            await until(lambda: request.url.host in drained)
            yield DRAINED
            await asyncio.Event().wait()

        return await streaming(records)(request)

    async def body() -> AsyncIterator[bytes]:
        yield line(1)
        await may_end.wait()
        yield line(2, "length")

    async def generate(request: httpx.Request) -> httpx.Response:
        return refusal("DrainingError") if drained else await streaming(body)(request)

    cluster.answers |= {"/events": events, "/generate": generate}
    replicas = ReplicaSet(SECRET, connect=cluster.connect, wait_seconds=0.0)
    for name in "ab":
        await replicas.add(name, f"http://{name}")
    answers = [asyncio.ensure_future(tokens(replicas.streams)) for _ in "ab"]
    await until(lambda: all(map(replicas.streams.num_streams, "ab")))
    drained.add("a")
    await until(lambda: replicas.available == ["b"])
    drained.add("b")
    await until(lambda: not replicas.available)
    may_end.set()
    assert await asyncio.gather(*answers) == [[1, 2]] * 2
    await replicas.close()


async def test_a_stream_that_fails_does_not_end_the_following_of_its_replica(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ReplicaStreams, "abandon", Mock(side_effect=RuntimeError("planted")))
    with caplog.at_level(logging.ERROR):
        cluster, events = Cluster(), Restarting()
        cluster.answers["/events"] = events
        replicas = await cluster.up("a")
        events.may_end.set()
        await until(lambda: cluster.made[0].is_closed and replicas.available == ["a"])
        await replicas.close()
    assert "replica 'a' cannot be followed" in caplog.text


async def test_an_ingress_whose_only_replica_is_drained_starts_when_that_one_is_back() -> None:
    """The replica had joined, so that no further attempt noticed its return: the ingress waited for ever."""
    cluster, events = Cluster(), Restarting(first=DRAINED)
    cluster.answers["/events"] = events
    replicas = cluster.replicas()
    membership = Membership(replicas, {"a": "http://a"})
    starting = asyncio.ensure_future(membership.wait_for_first())
    await until(lambda: replicas.names and not membership._changing)
    assert not replicas.available
    events.may_end.set()
    await asyncio.wait_for(starting, HANGING)
    assert replicas.available == ["a"]
    await membership.close()
    await replicas.close()
