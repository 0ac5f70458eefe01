"""Replicas that come, go, hang or cannot be understood: small cases, over replicas that are functions."""

from __future__ import annotations

import asyncio
import logging

import httpx
import pytest
from support.pretended_replicas import (
    HANGING,
    LOAD,
    SECRET,
    Cluster,
    answering,
    client_of,
    llm_of,
    load_record,
    tokens,
    until,
)

from radixkv.cluster import MismatchError, ReplicaSet
from radixkv.cluster.membership import Membership
from radixkv.cluster.records import Kind, encode_load, encode_record
from radixkv.engine.clearing import ALL_NAMESPACES
from radixkv.errors import ReplicasLostError


async def test_what_a_drained_replica_has_to_do_counts_while_it_works() -> None:
    """During an update, the load of all replicas used to look halved."""
    cluster = Cluster()
    drained = load_record(num_running=2, draining=True)
    cluster.events["http://a"] = [encode_record(Kind.HELD), drained]
    cluster.events["http://b"] = [encode_record(Kind.HELD), load_record(num_running=1)]
    replicas = await cluster.up(*"ab")
    await until(lambda: replicas.available == ["b"])
    assert llm_of(replicas).stats.num_running == 3
    await replicas.close()


async def test_a_changed_url_replaces_the_replica_of_that_name(caplog: pytest.LogCaptureFixture) -> None:
    cluster = Cluster()
    replicas = cluster.replicas()
    membership = Membership(replicas, {"a": "http://a", "b": "http://b"})
    await membership.wait_for_first()
    await until(lambda: sorted(replicas.available) == ["a", "b"])
    membership.update({"a": "http://new", "b": "http://b"})
    membership.update({"a": "http://newer", "b": "http://b"})  # while the first change is under way
    await until(lambda: not membership._changing and not replicas._leaving)
    assert sorted(replicas.available) == ["a", "b"]
    assert replicas._members["a"].url == "http://newer"
    membership.update({"a": "http://newest", "b": "http://b"})
    await until(lambda: not membership._changing and not replicas._leaving)
    assert replicas._members["a"].url == "http://newest"
    assert not caplog.messages  # the name was free when its new replica joined
    membership.update({"b": "http://b"})
    await until(lambda: replicas.names == ["b"] and not membership._changing)
    await membership.close()
    await replicas.close()
    assert all(client.is_closed for client in cluster.made)


@pytest.mark.parametrize("urls", [["http://new"], ["http://new", "http://newer"]], ids=["one change", "two changes"])
@pytest.mark.parametrize("has_joined", [False, True])
async def test_a_replica_is_removed_to_the_end_when_its_url_changes(
    urls: list[str], has_joined: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its successor waited for its streams, which had nowhere to go; a second change ended the removal, and it stayed."""
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_FOR_OTHERS", 0)
    cluster = Cluster()
    if not has_joined:
        cluster.events["http://a"] = [encode_record(Kind.HELD)]  # requests are sent there
    replicas = cluster.replicas()
    membership = Membership(replicas, {"a": "http://a"})
    starting = asyncio.ensure_future(membership.wait_for_first())
    await until(lambda: replicas.available)
    reading = asyncio.ensure_future(tokens(replicas.streams))
    await until(lambda: replicas.streams.num_on(cluster.made[0]))
    await starting
    for url in urls:
        membership.update({"a": url})
        await until(lambda: replicas._leaving)
        await until(lambda: replicas.added)
        assert replicas._leaving
    await until(lambda: not membership._changing and not replicas._leaving)
    assert replicas._members["a"].url == urls[-1]
    assert cluster.made[0].is_closed
    assert replicas.streams.num_streams("a") == 1
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await membership.close()
    await replicas.close()
    assert all(client.is_closed for client in cluster.made)


async def test_a_replica_has_one_name() -> None:
    """Under a second name, its blocks and its requests used to be counted twice."""
    cluster = Cluster()
    replicas = await cluster.up("a")
    with pytest.raises(MismatchError, match=r"^replica 'b' at http://a is replica 'a' at http://a: it would"):
        await replicas.add("b", "http://a")
    assert replicas.names == replicas.available == ["a"]
    membership = Membership(replicas, {"a": "http://a"})
    membership.update({"b": "http://a"})
    await until(lambda: replicas.names == replicas.available == ["b"])
    await membership.close()
    await replicas.close()


async def test_a_replica_that_hangs_does_not_keep_the_others_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """They used to join one after the other, and the first one's silence lasted two minutes."""
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_FOR_OTHERS", 0.0)
    cluster = Cluster()
    cluster.hung.add("http://a")
    replicas = cluster.replicas()
    membership = Membership(replicas, {"a": "http://a", "b": "http://b"})
    await asyncio.wait_for(membership.wait_for_first(), HANGING)
    assert replicas.available == ["b"]
    cluster.hung.clear()
    await membership.close()
    await replicas.close()


async def test_a_url_that_changes_at_the_start_is_tried_before_requests_are_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The end of an attempt at the earlier url used to count, as if the new one did not answer."""
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_FOR_OTHERS", HANGING)
    cluster = Cluster()
    cluster.hung |= {"http://b", "http://new"}

    async def cut_off(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("planted")

    def connect(url: str) -> httpx.AsyncClient:
        return client_of(cut_off, url) if url == "http://c" else cluster.connect(url)

    replicas = ReplicaSet(SECRET, connect=connect)
    membership = Membership(replicas, {"a": "http://a", "b": "http://b", "c": "http://c"})
    starting = asyncio.ensure_future(membership.wait_for_first())
    await until(lambda: membership._tried == {"a", "c"})
    membership.update({"a": "http://a", "b": "http://new", "c": "http://new"})
    await until(lambda: [client.base_url for client in cluster.made].count(httpx.URL("http://new")) == 2)
    for _ in range(10):
        await asyncio.sleep(0)
    assert not starting.done()
    assert membership._tried == {"a"}
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await membership.close()
    await replicas.close()


async def test_a_replica_that_was_never_reached_is_one_of_all() -> None:
    """It was one only during each attempt to reach it: between two of them, clearing the others was a success."""
    cluster = Cluster()

    async def cut_off(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("planted")

    def connect(url: str) -> httpx.AsyncClient:
        return client_of(cut_off, url) if url == "http://b" else cluster.connect(url)

    replicas = ReplicaSet(SECRET, connect=connect)
    membership = Membership(replicas, {"a": "http://a", "b": "http://b"})
    await membership.wait_for_first()
    await until(lambda: replicas.added == ["a"])  # the attempt has failed
    assert replicas.names == ["a", "b"]
    assert "b" not in replicas.loads
    with pytest.raises(ReplicasLostError, match="are down, or did not do it: 'b'; ask again"):
        await llm_of(replicas).clear(ALL_NAMESPACES)
    membership.update({"a": "http://a"})
    await until(lambda: not membership._changing)
    assert (await llm_of(replicas).clear(ALL_NAMESPACES)).namespaces == 1
    membership.update({})
    await until(lambda: not replicas.added and not membership._changing)
    with pytest.raises(ReplicasLostError, match="there is no replica"):
        await llm_of(replicas).clear(ALL_NAMESPACES)
    await membership.close()
    await replicas.close()


async def test_the_start_lasts_until_a_replica_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_BETWEEN_ATTEMPTS", 0.0)
    cluster = Cluster()
    attempts: list[str] = []

    async def cut_off(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("planted")

    def connect(url: str) -> httpx.AsyncClient:
        attempts.append(url)
        return cluster.connect(url) if len(attempts) > 2 else client_of(cut_off, url)

    replicas = ReplicaSet(SECRET, connect=connect)
    membership = Membership(replicas, {"a": "http://a"})
    await asyncio.wait_for(membership.wait_for_first(), HANGING)
    assert replicas.available == ["a"]
    await membership.close()
    await replicas.close()


@pytest.mark.parametrize("others", [{}, {"a": "http://a"}], ids=["alone", "beside another"])
async def test_a_replica_that_is_refused_at_the_start_ends_it(others: dict[str, str]) -> None:
    cluster = Cluster()

    def connect(url: str) -> httpx.AsyncClient:
        if url == "ftp://b":
            raise ValueError("url: planted")
        return cluster.connect(url)

    replicas = ReplicaSet(SECRET, connect=connect)
    membership = Membership(replicas, {**others, "b": "ftp://b"})
    with pytest.raises(ValueError, match="url: planted"):
        await asyncio.wait_for(membership.wait_for_first(), HANGING)
    await membership.close()
    await replicas.close()


async def test_a_removed_replica_s_streams_are_not_those_of_its_successor() -> None:
    cluster = Cluster()
    replicas = await cluster.up("a")
    first = asyncio.ensure_future(tokens(replicas.streams))
    await until(lambda: replicas.streams.num_streams("a"))
    removal = asyncio.ensure_future(replicas.remove("a"))  # it waits: there is nowhere else
    await until(lambda: not replicas.names)
    assert replicas.streams.num_streams("a") == 0
    await replicas.add("a", "http://other")
    await asyncio.wait_for(removal, HANGING)
    assert replicas.streams.num_streams("a") == 1
    (attempt,) = replicas.streams._attempts[replicas._clients["a"]]
    attempt.check()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await replicas.close()


async def test_a_replica_that_hangs_is_marked_down_at_the_first_silence() -> None:
    cluster = Cluster()
    replicas = await cluster.up("a")
    client = replicas._clients["a"]
    cluster.hung.add("http://a")
    await until(lambda: not replicas.available)
    await until(lambda: client.is_closed)
    assert len(cluster.timeouts) == 1  # it was marked down without being asked again
    cluster.answers["/events"] = answering(encode_record(Kind.HELD), encode_load(LOAD))
    cluster.hung.clear()
    await until(lambda: replicas.available == ["a"])
    # Its events have ended, so it is asked again while it is up: by now it has made its description.
    await until(lambda: cluster.timeouts[-1] < cluster.timeouts[0])
    await replicas.close()
    assert all(each.is_closed for each in cluster.made)


async def test_removing_a_replica_ends_the_wait_for_it() -> None:
    cluster = Cluster()
    replicas = cluster.replicas()
    cluster.hung.add("http://a")
    adding = asyncio.ensure_future(replicas.add("a", "http://a"))
    await until(lambda: cluster.timeouts)
    await replicas.remove("a")
    with pytest.raises(ConnectionError, match="replica 'a' was removed before it was up"):
        await asyncio.wait_for(adding, HANGING)
    assert all(client.is_closed for client in cluster.made)


@pytest.mark.parametrize(
    "record",
    [
        encode_record(Kind.LOAD, b'{"draining": false}'),
        load_record(num_blocks="x"),
        load_record(num_queued_tokens=-1),
        load_record(prefill_seconds_per_token=float("nan")),
        load_record(counters={"num_steps": float("inf")}),
        encode_record(Kind.STORED, bytes(7)),
        encode_record(Kind.ARRIVED, bytes(15)),
        encode_record(Kind.ARRIVED, bytes(16)),
        encode_record(Kind.PREFILLED, bytes(10)),
        encode_record(Kind.ENDED, bytes(10)),
        b"\xff\0\0\0\0",
    ],
    ids=[
        "a load",
        "a word",
        "a negative",
        "no number",
        "infinity",
        "blocks",
        "half a request",
        "a request without tokens",
        "the first token of none",
        "the end of none",
        "of no kind",
    ],
)
async def test_malformed_events_put_a_replica_down(record: bytes, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        cluster = Cluster()
        cluster.events["http://a"] = [encode_record(Kind.HELD), encode_load(LOAD), record]
        replicas = await cluster.up("a")
        await until(lambda: not replicas.available)
        await replicas.close()
    assert "replica 'a' cannot be followed" in caplog.text


async def test_events_that_end_at_once_are_not_read_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """For each reading, a replica lists all that it holds, between two steps of its engine."""
    monkeypatch.setattr("radixkv.cluster.replica_set._SECONDS_BETWEEN_ATTEMPTS", HANGING)
    cluster, num_read = Cluster(), 0

    async def ending(request: httpx.Request) -> httpx.Response:
        nonlocal num_read
        num_read += 1
        return httpx.Response(200, content=encode_record(Kind.HELD) + encode_load(LOAD))

    cluster.answers["/events"] = ending
    replicas = await cluster.up("a")
    for _ in range(1000):
        await asyncio.sleep(0)
    assert num_read == 1
    await replicas.close()


async def test_a_removed_replica_is_followed_until_its_streams_have_ended() -> None:
    """What nobody else can continue stays with it; if it falls silent, the stream ends, and so does the removal."""
    cluster = Cluster()
    replicas = await cluster.up("a")
    reading = asyncio.ensure_future(tokens(replicas.streams))
    await until(lambda: replicas.streams.num_on(cluster.made[0]))
    removing = asyncio.ensure_future(replicas.remove("a"))
    await until(lambda: not replicas.names)
    assert not removing.done()
    cluster.hung.add("http://a")
    await asyncio.wait_for(removing, HANGING)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await replicas.close()
    assert all(client.is_closed for client in cluster.made)


async def test_a_busy_replica_is_not_silent() -> None:
    """Its load may come before the list of what it holds, which its engine makes between two steps."""
    cluster = Cluster()
    cluster.events["http://a"] = [encode_load(LOAD), encode_load(LOAD), encode_record(Kind.HELD), encode_load(LOAD)]
    replicas = await cluster.up("a")
    assert replicas.available == ["a"]
    await replicas.close()


async def test_a_replica_that_was_refused_is_tried_until_it_is_up_and_logged_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_BETWEEN_ATTEMPTS", 0.0)
    cluster = Cluster()
    cluster.identities["http://b"] = {"block_size": 8}
    replicas = await cluster.up("a")
    membership = Membership(replicas, {"a": "http://a"})
    membership.update({"a": "http://a", "b": "http://b"})
    await until(lambda: len(cluster.made) > 4)
    assert sum("block_size: 16, and 8 there" in message for message in caplog.messages) == 1
    assert not membership.is_outdated
    cluster.hung.add("http://a")
    await until(lambda: not replicas.available)
    assert membership.is_outdated
    cluster.identities.clear()
    await until(lambda: replicas.available == ["b"])
    await until(lambda: not membership._changing)
    cluster.hung.add("http://b")
    await until(lambda: not replicas.available)
    assert not membership.is_outdated  # it may come back
    await membership.close()
    await replicas.close()


async def test_a_refusal_is_forgotten_with_the_url_that_it_was_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.membership._SECONDS_BETWEEN_ATTEMPTS", 0.0)
    cluster = Cluster()
    cluster.identities["http://b"] = {"block_size": 8}
    cluster.hung.add("http://c")
    replicas = await cluster.up("a")
    membership = Membership(replicas, {"a": "http://a"})
    membership.update({"a": "http://a", "b": "http://b"})
    await until(lambda: membership._refused)
    cluster.hung.add("http://a")
    await until(lambda: not replicas.available)
    assert membership.is_outdated
    membership.update({"a": "http://a", "b": "http://c"})
    await until(lambda: not membership.is_outdated)
    membership.update({"a": "http://a", "b": "http://b"})
    await until(lambda: membership.is_outdated)
    membership.update({"a": "http://a"})
    await until(lambda: not membership._changing)
    assert not membership.is_outdated
    await membership.close()
    await replicas.close()
