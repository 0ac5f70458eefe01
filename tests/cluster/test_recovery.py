"""What an ingress does with requests when replicas go, hang or are full: small cases, over replicas that are functions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from support.pretended_replicas import (
    GREEDY,
    HANGING,
    PROMPT,
    SECRET,
    Cluster,
    answering,
    client_of,
    line,
    llm_of,
    refusal,
    streaming,
    streams_over,
    tokens,
    until,
)

from radixkv import BeamSearchParams, SamplingParams
from radixkv.cluster import ReplicaSet
from radixkv.cluster.losses import Losses, RefusedError
from radixkv.cluster.wire import encode_begun, encode_scheduled
from radixkv.errors import DrainingError, NoBlocksLeftError, QueueFullError, ReplicasLostError, RequestTooLargeError
from radixkv.outputs import DraftCounts, RequestMetrics
from radixkv.prompts import Prompt


async def test_without_replicas_no_place_in_the_queue_is_lost() -> None:
    cluster = Cluster()
    replicas = ReplicaSet(SECRET, connect=cluster.connect, wait_seconds=0.0)
    await replicas.add("a", "http://a")
    llm = llm_of(replicas, max_queue=0)
    await replicas.remove("a")
    for _ in range(6):  # there are 4 queue slots
        with pytest.raises(ReplicasLostError, match="there is no replica"):
            await llm.submit([Prompt([1, 2])], SamplingParams(max_tokens=None))
    assert llm.num_slots_taken == 0
    assert await llm.shutdown()


async def test_how_long_answers_take_is_learned() -> None:
    """Clients that find the queue full are told to retry after that time, which used to stay the first guess for ever."""
    cluster = Cluster()
    cluster.answers["/generate"] = answering(line(5, "length"))
    replicas = await cluster.up("a")
    llm = llm_of(replicas)
    before = llm._intake._mean_seconds
    for _ in range(3):
        (stream,) = await llm.submit([Prompt([1, 2])], GREEDY)
        assert [part.token_ids async for delta in stream for part in delta.outputs] == [[5]]
    assert llm._intake._mean_seconds < 0.8 * before
    await llm.shutdown()
    await replicas.close()


async def test_a_request_is_timed_from_the_arrival_that_it_is_given() -> None:
    cluster = Cluster()
    cluster.answers["/generate"] = answering(line(5, "length"))
    replicas = await cluster.up("a")
    llm = llm_of(replicas)
    (stream,) = await llm.submit([Prompt([1, 2])], GREEDY, times=[RequestMetrics(3.5)])
    assert [stream.times.arrival_time, *[delta.metrics.arrival_time async for delta in stream]] == [3.5, 3.5]
    await llm.shutdown()
    await replicas.close()


async def test_a_shutdown_ends_what_no_replica_has_accepted_yet() -> None:
    cluster = Cluster()
    replicas = await cluster.up("a")
    llm = llm_of(replicas)
    submitted = asyncio.ensure_future(llm.submit([Prompt([1, 2]), Prompt([3])], GREEDY))
    await until(lambda: llm.num_slots_taken == 2)
    assert not await llm.shutdown()
    with pytest.raises(DrainingError):
        await asyncio.wait_for(submitted, HANGING)
    assert llm.num_slots_taken == 0
    assert not await llm.shutdown()  # as a server asks, for its log
    await replicas.close()


async def test_what_waits_for_a_replica_goes_on_as_soon_as_one_is_up() -> None:
    cluster = Cluster()
    cluster.answers["/generate"] = answering(line(7, "length"))
    replicas = ReplicaSet(SECRET, connect=cluster.connect, wait_seconds=2 * HANGING)
    await replicas.add("a", "http://a")
    await replicas.remove("a")
    answer = asyncio.ensure_future(tokens(replicas.streams))
    for _ in range(10):
        await asyncio.sleep(0)
    await replicas.add("b", "http://b")
    assert await asyncio.wait_for(answer, HANGING) == [7]
    await replicas.close()


async def test_what_was_begun_waits_for_a_replica_with_room() -> None:
    num_refusals = 0

    async def dying(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            raise httpx.ConnectError("planted")
        streams.router.remove("dying")
        del clients["dying"]
        clients["full"] = client_of(full)
        streams.router.add("full")
        return await answering(line(1), breaks=True)(request)

    async def full(request: httpx.Request) -> httpx.Response:
        nonlocal num_refusals
        if num_refusals < 2:
            num_refusals += 1
            return refusal("QueueFullError")
        return await answering(line(2, "length"))(request)

    clients = {"dying": client_of(dying)}
    streams = streams_over(clients, wait_seconds=30)
    assert await tokens(streams) == [1, 2]
    num_refusals = -(10**6)
    clients = {"dying": client_of(dying)}
    streams = streams_over(clients)
    with pytest.raises(ReplicasLostError, match="'one' was begun, and no replica has room to go on with it"):
        await tokens(streams)


async def test_an_answer_that_goes_on_elsewhere_counts_there_with_what_was_begun() -> None:
    """A replica that had to compute a thousand tokens of it again was taken to be nearly idle."""

    async def hanging() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    breaking = answering(line(1), line(2), breaks=True)
    streams = streams_over({"a": client_of(breaking), "b": client_of(streaming(hanging))})
    answer = asyncio.ensure_future(tokens(streams))
    await until(lambda: streams.num_streams("b"))
    assert streams.router._replicas["b"].queued == len(PROMPT.token_ids) + 2
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)


@pytest.mark.parametrize(
    "reason", [QueueFullError("full", 1), RequestTooLargeError("too large"), NoBlocksLeftError("pinned")]
)
def test_a_token_makes_old_refusals_forgotten(
    reason: QueueFullError | RequestTooLargeError | NoBlocksLeftError,
) -> None:
    losses, client = Losses("one"), client_of(answering())
    losses.note_refusal("a", client, RefusedError(reason))
    assert losses.refused_by({"a": client}) == {"a"}
    assert losses.refused_by({"a": client_of(answering())}) == set()  # it was restarted
    losses.progress(None)
    assert losses.refused_by({"a": client}) == set()
    assert losses.wait_until(0.0, 1.0) == 1.0


def changed(written: bytes, **fields: Any) -> bytes:
    """A line of which some fields are others."""
    return json.dumps({**json.loads(written), **fields}).encode() + b"\n"


async def test_the_drafts_of_all_replicas_that_had_a_request_are_counted() -> None:
    first = [changed(line(token_id), drafts={"tree": counts}) for token_id, counts in ((1, [4, 2]), (2, [6, 3]))]
    last = changed(line(3, "length"), drafts={"tree": [5, 5]})
    streams = streams_over({"a": client_of(answering(*first, breaks=True)), "b": client_of(answering(last))})
    times = RequestMetrics(0.0)
    assert await tokens(streams, times=times) == [1, 2, 3]
    assert times.drafts == {"tree": DraftCounts(11, 8)}


async def test_an_answer_whose_last_token_came_before_its_replica_broke_off_ends() -> None:
    """Its end brings nothing new; without it, who reads the answer would wait for ever."""
    lost = answering(changed(line(1, "length"), finished=False), breaks=True)
    ended = answering(changed(line(1, "length"), outputs=[[0, "", [], None, None, "length", None]]))
    streams = streams_over({"a": client_of(lost), "b": client_of(ended)})
    deltas = [delta async for delta in streams.generate(PROMPT, GREEDY, "one")]
    assert [(len(delta.outputs), delta.finished) for delta in deltas] == [(1, False), (0, True)]


async def test_a_request_is_accepted_and_scheduled_once_and_has_one_seed_wherever_it_goes_on() -> None:
    seeds, first_times = list[int | None](), list[float | None]()

    async def handler(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/health":
            return httpx.Response(200)
        seeds.append(json.loads(await request.aread())["params"]["seed"])
        first_times.append(times.first_token_time)
        lines = [encode_scheduled(), line(1)] if len(seeds) == 1 else [encode_scheduled(), line(2, "length")]
        return await answering(*lines, breaks=True)(request)

    streams = streams_over({"a": client_of(handler), "b": client_of(handler)})
    times, accepted = RequestMetrics(0.0), list[None]()
    options: Any = {"times": times, "on_accepted": lambda: accepted.append(None)}
    assert await tokens(streams, params=SamplingParams(max_tokens=10), **options) == [1, 2]
    assert len(accepted) == 1
    assert seeds[0] == seeds[1] is not None
    assert first_times == [None, times.first_token_time]
    assert times.scheduled_time is not None
    assert times.first_token_time is not None
    assert times.scheduled_time <= times.first_token_time


def test_a_stream_that_a_drained_replica_ends_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.cluster.losses._MAX_LOSSES", 1)

    async def drained() -> AsyncIterator[bytes]:
        streams.router.remove("a")
        yield line(1, "abort")

    streams = streams_over({"a": client_of(streaming(drained)), "b": client_of(answering(line(2, "length")))})
    assert asyncio.run(tokens(streams)) == [1, 2]


async def test_a_cancelled_request_ends_its_own_trial_alone() -> None:
    gate, num_begun = asyncio.Event(), 0

    async def dying(request: httpx.Request) -> httpx.Response:
        return httpx.Response(503 if request.url.path == "/health" else 200, content=b"")

    async def one_at_a_time() -> AsyncIterator[bytes]:
        nonlocal num_begun
        num_begun += 1
        await gate.wait()
        yield line(1, "length")

    streams = streams_over({"a": client_of(dying), "b": client_of(streaming(one_at_a_time))})
    streams.router.expect("b", "another's", [], 100_000)  # so that "a" is the first choice
    tasks = [asyncio.ensure_future(tokens(streams, request_id=f"{number}")) for number in range(3)]
    await until(lambda: streams.num_streams("b") == 3 and num_begun == 1)
    tasks[1].cancel()
    await until(tasks[1].done)
    for _ in range(20):
        await asyncio.sleep(0)
    assert num_begun == 1
    tasks[0].cancel()
    await until(lambda: num_begun == 2)
    gate.set()
    assert await tasks[2] == [1]
    assert not streams._attempts
    assert not streams._trials


async def test_a_search_that_has_begun_is_computed_no_longer_and_ends_its_trial() -> None:
    """Until its end, the router counted its prompt as not computed, and requests that were suspected with it waited."""
    died, begun = asyncio.Event(), list[str]()

    async def until_it_dies() -> AsyncIterator[bytes]:
        await died.wait()
        raise httpx.ReadError("planted")
        yield b""

    async def dying(request: httpx.Request) -> httpx.Response:
        is_asked = request.url.path == "/health"
        return httpx.Response(503) if is_asked else await streaming(until_it_dies)(request)

    async def handler(request: httpx.Request) -> httpx.Response:
        is_search = json.loads(await request.aread())["use_beam_search"]

        async def body() -> AsyncIterator[bytes]:
            begun.append("search" if is_search else "stream")
            yield encode_begun() if is_search else line(1, "length")
            await asyncio.Event().wait()

        return await streaming(body)(request)

    clients = {"a": client_of(dying)}
    streams = streams_over(clients)
    search = asyncio.ensure_future(streams.beam_search(Prompt([1, 2]), BeamSearchParams(2, 9), "search"))
    await until(lambda: streams.num_streams("a") == 1)
    stream = asyncio.ensure_future(tokens(streams))
    await until(lambda: streams.num_streams("a") == 2)
    clients["b"] = client_of(handler)
    streams.router.add("b")
    streams.router.remove("a")
    died.set()
    async with asyncio.timeout(HANGING):
        assert await stream == [1]
    assert begun == ["search", "stream"]
    state = streams.router._replicas["b"]
    assert (len(state.waiting), len(state.decoding)) == (0, 1)
    search.cancel()


async def test_what_is_too_large_for_one_replica_may_fit_into_another() -> None:
    async def small(request: httpx.Request) -> httpx.Response:
        return refusal("RequestTooLargeError", 400)

    clients = {"small": client_of(small)}
    streams = streams_over(clients, wait_seconds=30)
    with pytest.raises(RequestTooLargeError, match="no room"):
        await tokens(streams)
    clients["large"] = client_of(answering(line(1, "length")))
    streams.router.add("large")
    streams.router.expect("large", "another's", [], 100_000)  # so that the small one is asked first
    assert await tokens(streams) == [1]


async def test_an_answer_is_read_to_the_end_of_its_response() -> None:
    ended = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield line(1, "length")
        await asyncio.sleep(0)
        ended.set()

    assert await tokens(streams_over({"a": client_of(streaming(body))})) == [1]
    assert ended.is_set()
