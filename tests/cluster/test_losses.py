"""A request that engines die of is sent to two of them, and to no third; an innocent one that was moved with it goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

import httpx
import pytest
from support.pretended_replicas import Cluster, answering, line, streaming, streams_over, tokens, until
from support.time_limit import HANGING

from radixkv import BeamSearchParams, SamplingParams
from radixkv.cluster import ReplicaStreams
from radixkv.cluster.answer_lines import answer_lines
from radixkv.cluster.attempt import Attempt, MovedError
from radixkv.cluster.losses import Losses, LostError, RefusedError
from radixkv.cluster.wire import encode_begun, encode_error
from radixkv.errors import (
    NoBlocksLeftError,
    QueueFullError,
    ReplicasLostError,
    RequestCrashesError,
    RequestTooLargeError,
)
from radixkv.outputs import RequestMetrics
from radixkv.prompts import Prompt

FULL, TOO_LARGE = QueueFullError("the queue is full", retry_after=3), RequestTooLargeError("it is too large")


class Replica(httpx.AsyncBaseTransport):
    """Sends tokens chosen by how many it is given, and then dies or, after a last line, does not.

    Args:
        answer: lines for a number of tokens, and whether it dies then.
        accepts: whether it accepts a request before it dies.
    """

    def __init__(self, answer: Callable[[int], tuple[list[bytes], bool]], *, accepts: bool = True) -> None:
        self._answer = answer
        self._accepts = accepts
        self._dead = False
        self.num_requests = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if self._dead:
            raise httpx.ConnectError("planted")
        if request.url.path == "/health":
            return httpx.Response(200)
        self.num_requests += 1
        sent = json.loads(await request.aread())
        parts, self._dead = self._answer(sum(len(output["token_ids"]) for output in sent["resume"]))
        if not self._accepts:
            raise httpx.ReadError("planted")
        return await answering(*parts, breaks=self._dead)(request)


def client_of(replica: httpx.AsyncBaseTransport) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=replica, base_url="http://replica")


def streams_of(*replicas: httpx.AsyncBaseTransport, wait_seconds: float = 0.0) -> ReplicaStreams:
    clients = {f"r{number}": client_of(replica) for number, replica in enumerate(replicas)}
    return streams_over(clients, wait_seconds=wait_seconds)


@pytest.mark.parametrize("accepts", [True, False])
def test_what_two_replicas_died_of_is_sent_to_no_third(accepts: bool) -> None:
    """If they died before they could accept it, it was sent to four."""

    def answer(num_given: int) -> tuple[list[bytes], bool]:
        return [line(7)] if num_given == 0 else [], True

    replicas = [Replica(answer, accepts=accepts) for _ in range(4)]
    with pytest.raises(RequestCrashesError, match="'one' was on 2 replicas when they died, at the same token"):
        asyncio.run(tokens(streams_of(*replicas)))
    assert sum(replica.num_requests for replica in replicas) == 2


def test_a_search_has_not_gone_on_between_deaths_because_each_replica_has_begun_it() -> None:
    """It starts over, and so comes to what engines die of each time."""
    replicas = [Replica(lambda _: ([encode_begun()], True)) for _ in range(4)]
    search = streams_of(*replicas).beam_search(Prompt([1, 2, 3]), BeamSearchParams(beam_width=2, max_tokens=3), "one")
    with pytest.raises(RequestCrashesError, match="'one' was on 2 replicas when they died"):
        asyncio.run(search)
    assert sum(replica.num_requests for replica in replicas) == 2


def test_a_replica_that_breaks_off_and_lives_is_no_death() -> None:
    replicas = [Replica(lambda _: ([], False), accepts=False) for _ in range(4)]
    with pytest.raises(ReplicasLostError, match="was lost by 4 replicas"):
        asyncio.run(tokens(streams_of(*replicas)))


@pytest.mark.parametrize("n", [1, 2], ids=["one sample", "one of two samples"])
def test_a_stream_that_goes_on_between_deaths_is_not_their_cause(n: int) -> None:
    def one_token(num_given: int) -> tuple[list[bytes], bool]:
        end = "length" if num_given == 5 else None
        piece = json.loads(line(10 + num_given, end))
        piece["outputs"] += [[index, "", [], None, None, end, None] for index in range(1, n)]
        return [json.dumps(piece).encode() + b"\n"], num_given < 5

    replicas = [Replica(one_token) for _ in range(6)]
    answer = tokens(streams_of(*replicas), params=SamplingParams(n=n, seed=1, max_tokens=6))
    assert asyncio.run(answer) == [10, 11, 12, 13, 14, 15]


def test_an_answer_goes_on_where_it_was_lost_before_it_mixes_generations() -> None:
    lives = Replica(lambda num_given: ([line(7)] if num_given == 0 else [line(8, "length")], False))
    other = Replica(lambda _: ([line(9, "length")], False))
    clients = {"a": client_of(lives), "b": client_of(other)}
    streams = streams_over(clients, generations={"a": "one", "b": "two"})
    assert asyncio.run(tokens(streams)) == [7, 8]
    assert (lives.num_requests, other.num_requests) == (2, 0)


async def test_requests_that_are_not_suspected_do_not_wait_for_each_other() -> None:
    asked = list[str]()

    async def hanging(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return await asyncio.Future()

    streams = streams_of(httpx.MockTransport(hanging))
    answers = [asyncio.ensure_future(tokens(streams)) for _ in range(2)]
    await until(lambda: asked == ["/generate"] * 2)
    for answer in answers:
        answer.cancel()
    await asyncio.gather(*answers, return_exceptions=True)


def test_a_piece_without_a_token_is_not_the_first_token() -> None:
    piece = {"outputs": [[0, "", [], None, None, None, None]], "finished": False}
    sent = json.dumps({**piece, "num_cached_tokens": 0, "prompt_logprobs": None}).encode() + b"\n"
    replicas, times = [Replica(lambda _: ([sent], True)) for _ in range(2)], RequestMetrics(0.0)
    with pytest.raises(RequestCrashesError):
        asyncio.run(tokens(streams_of(*replicas), times=times))
    assert times.first_token_time is None


def test_replicas_that_are_full_are_no_loss() -> None:
    class Full(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            return httpx.Response(503, json={"error": "full", "kind": "QueueFullError", "retry_after": 7})

    done = Replica(lambda num_given: ([line(5, "length")], False))
    assert asyncio.run(tokens(streams_of(Full(), done))) == [5]
    with pytest.raises(QueueFullError, match="full") as refusal:
        asyncio.run(tokens(streams_of(Full(), Full())))
    assert refusal.value.retry_after == 7


def pinned_full(_: int) -> tuple[list[bytes], bool]:
    return [encode_error(NoBlocksLeftError("request 'one' needs 3 blocks, and only 2 of 4 can be had"))], False


@pytest.mark.parametrize(("num_replicas", "num_requests"), [(1, 1), (4, 2)])
def test_what_pins_leave_no_room_for_is_tried_on_one_more_replica_and_is_not_lost(
    num_replicas: int, num_requests: int, caplog: pytest.LogCaptureFixture
) -> None:
    """It used to be sent to four replicas, and to be reported as lost by them."""
    replicas = [Replica(pinned_full) for _ in range(num_replicas)]
    streams = streams_of(*replicas, wait_seconds=HANGING)
    with (
        caplog.at_level(logging.INFO),
        pytest.raises(NoBlocksLeftError, match=r"^request 'one' needs 3 blocks, and only 2 of 4 can be had$"),
    ):
        asyncio.run(tokens(streams))
    assert sum(replica.num_requests for replica in replicas) == num_requests
    assert not [message for message in caplog.messages if "lost" in message or "given up" in message]


def test_what_pins_leave_no_room_for_goes_on_where_there_is_room() -> None:
    starved = Replica(lambda _: ([line(5), *pinned_full(1)[0]], False))
    roomy = Replica(lambda num_given: ([line(6 + num_given, "length")], False))
    assert asyncio.run(tokens(streams_of(starved, roomy))) == [5, 7]


def test_without_any_replica_the_error_names_that() -> None:
    with pytest.raises(ReplicasLostError, match="request 'one': there is no replica"):
        asyncio.run(tokens(streams_of()))


@pytest.mark.parametrize("error", [httpx.ConnectError, httpx.ReadError])
def test_a_replica_that_cannot_be_reached_or_broke_off_is_not_tried_again_at_once(error: type[httpx.HTTPError]) -> None:
    """It has ended, which is known a moment later, as is the replica that comes in its place."""
    attempts = 0

    class Ended(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            nonlocal attempts
            if request.url.path == "/generate":
                attempts += 1
                asyncio.get_running_loop().call_later(0.01, replace)
            raise error("planted")

    def replace() -> None:
        streams.router.remove("old")
        del clients["old"]
        streams.router.add("new")
        clients["new"] = client_of(Replica(lambda _: ([line(7), line(8, "length")], False)))

    clients = {"old": client_of(Ended())}
    streams = streams_over(clients, wait_seconds=HANGING)
    assert asyncio.run(tokens(streams)) == [7, 8]
    assert attempts == 1


class Refusing(httpx.AsyncBaseTransport):
    """Refuses the first connections, and answers at the next one."""

    def __init__(self, num_refused: int) -> None:
        self.num_refused = num_refused
        self.num_attempts = 0

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self.num_attempts += 1
        if self.num_attempts <= self.num_refused:
            raise httpx.ConnectError("planted")
        return await answering(line(7, "length"))(request)


def test_a_replica_that_never_had_a_request_has_not_lost_it() -> None:
    """After all replicas were killed, refused connections used to count as losses: streams ended before the 30 seconds."""
    replicas = [Refusing(2) for _ in range(5)]
    streams = streams_of(*replicas, wait_seconds=HANGING)
    assert asyncio.run(tokens(streams)) == [7]
    assert sum(replica.num_attempts for replica in replicas) == 2 * len(replicas) + 1


def test_a_replica_that_refuses_connections_is_not_tried_for_ever() -> None:
    replica = Refusing(10**6)
    with pytest.raises(ReplicasLostError, match="request 'one': there is no replica that takes it"):
        asyncio.run(tokens(streams_of(replica, wait_seconds=0.0)))
    assert replica.num_attempts == 1


def test_what_waits_for_its_turn_on_a_replica_that_dies_is_not_lost_there() -> None:
    attempt = Attempt("a", None, 10, begun=True)
    attempt.abandon()
    with pytest.raises(RefusedError):
        attempt.check()
    attempt.sent = True
    for accepted in (False, True):
        attempt.accepted = accepted
        with pytest.raises(LostError) as loss:
            attempt.check()
        assert loss.value.died is accepted


async def test_a_replica_that_falls_silent_before_it_takes_a_request_has_not_died_of_it() -> None:
    """Of two hosts that were cut off, the second was never reached: the request was refused, though a third was up."""
    cluster, asked = Cluster(), list[str]()

    async def accepting() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async def generate(request: httpx.Request) -> httpx.Response:
        asked.append(f"http://{request.url.host}")
        if len(asked) == 2:
            await asyncio.Event().wait()  # as it connects to a host that is cut off
        return await (streaming(accepting) if len(asked) == 1 else answering(line(7, "length")))(request)

    cluster.answers["/generate"] = generate
    replicas = await cluster.up(*"abc")
    accepted = asyncio.Event()
    answer = asyncio.ensure_future(tokens(replicas.streams, on_accepted=accepted.set))
    async with asyncio.timeout(HANGING):
        await accepted.wait()
        cluster.hung.add(asked[0])
        await until(lambda: len(asked) == 2)
        cluster.hung.add(asked[1])
        assert await answer == [7]
    await replicas.close()


async def test_a_replica_that_falls_silent_after_it_took_a_request_may_have_died_of_it() -> None:
    async def accepting() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    attempt = Attempt("a", None, 10, begun=False)
    transport = httpx.MockTransport(streaming(accepting))
    async with client_of(transport) as client, aclosing(answer_lines("a", client, b"{}", {}, attempt.send)) as lines:
        reading = attempt.read(lines)
        assert await anext(reading) is None
        attempt.abandon()
        with pytest.raises(LostError, match="a: it died") as loss:
            await anext(reading)
        assert loss.value.died


async def test_a_replica_that_broke_off_has_died_even_if_it_is_marked_down_during_the_health_check() -> None:
    asked, gone = list[str](), asyncio.Event()

    async def handler(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        if request.url.path == "/health":
            await gone.wait()
            raise httpx.ConnectError("planted")
        raise httpx.ReadError("planted")

    streams = streams_of(*[httpx.MockTransport(handler)] * 3)
    answer = asyncio.ensure_future(tokens(streams))
    for num_asked in (2, 4):
        gone.clear()
        await until(lambda expected=num_asked: len(asked) == expected)
        for client in streams._clients.values():
            streams.abandon(client)
        await asyncio.sleep(0)
        gone.set()
    with pytest.raises(RequestCrashesError):
        await asyncio.wait_for(answer, HANGING)
    assert asked == ["/generate", "/health"] * 2


def test_pauses_between_attempts_on_full_replicas_grow_until_one_accepts() -> None:
    """Each attempt sends the whole request: a lost replica's hundred long ones used to hold up all other streams."""
    losses = Losses("one")
    losses.note_acceptance()
    assert [losses.next_pause() for _ in range(5)] == [0.25, 0.5, 1.0, 2.0, 2.0]
    losses.note_acceptance()
    assert losses.next_pause() == 0.25


def test_a_replica_that_lost_or_refused_a_request_before_its_latest_token_is_chosen_again() -> None:
    losses, client = Losses("one"), client_of(Refusing(0))
    for _ in range(2):
        losses.note_loss("a", client, LostError("planted"), died=True)
        assert losses.lost_by({"a": client}) == {"a"}
        losses.progress("generation")
        assert not losses.lost_by({"a": client})
        assert not losses.suspected
    losses.note_refusal("a", client, RefusedError(None))
    assert losses.refused_by({"a": client}) == {"a"}
    losses.progress("generation")
    assert not losses.refused_by({"a": client})


@pytest.mark.parametrize(
    ("reasons", "expected"),
    [
        ([TOO_LARGE], TOO_LARGE),
        ([FULL, TOO_LARGE], FULL),
        ([TOO_LARGE, FULL], FULL),
    ],
)
def test_what_fits_on_a_replica_that_is_full_is_not_refused_as_too_large(
    reasons: list[QueueFullError | RequestTooLargeError], expected: Exception
) -> None:
    losses, client = Losses("one"), client_of(Refusing(0))
    for name, reason in zip("ab", reasons, strict=False):
        losses.note_refusal(name, client, RefusedError(reason))
    with pytest.raises(type(expected), match=f"{expected}"):
        losses.wait_until(0.0, 30.0)


async def test_a_stream_that_is_called_away_twice_leaves_once() -> None:
    """The second call met a timeout that was expiring, which cannot be set again."""

    async def hanging() -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""

    attempt = Attempt("a", None, 10, begun=False)
    reading = asyncio.ensure_future(anext(attempt.read(hanging())))
    for _ in range(3):
        await asyncio.sleep(0)
        attempt.move([(None, 10)])
    with pytest.raises(MovedError):
        await reading


async def test_a_stream_that_is_called_away_between_two_lines_leaves_before_the_next() -> None:
    async def lines() -> AsyncGenerator[bytes, None]:
        yield b"one"
        yield b"two"

    attempt, read = Attempt("a", None, 10, begun=False), list[bytes]()
    with pytest.raises(MovedError):
        async for each in attempt.read(lines()):
            read.append(each)
            attempt.move([(None, 10)])
    assert read == [b"one"]


def test_the_time_to_wait_begins_anew_when_a_replica_accepts_or_loses_the_request() -> None:
    losses, client = Losses("one"), client_of(Refusing(0))
    assert losses.wait_until(0.0, 10.0) == losses.wait_until(9.0, 10.0) == 10.0
    losses.note_acceptance()
    assert losses.wait_until(9.0, 10.0) == 19.0
    losses.note_loss("a", client, LostError("planted"))
    assert losses.wait_until(18.0, 10.0) == 28.0
    with pytest.raises(ReplicasLostError):
        losses.wait_until(28.0, 10.0)
    assert losses.lost_by({"a": client}) == {"a"}
    assert losses.lost_by({"a": client_of(Refusing(0))}) == set()  # it was restarted
