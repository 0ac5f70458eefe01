"""What an ingress does when replicas go, hang or are full: small cases, over replicas that are functions."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from radixkv import SamplingParams
from radixkv.cluster import ClusterLLM, ReplicaSet, ReplicaStreams
from radixkv.cluster.announcement import Announcements
from radixkv.cluster.connection import connect
from radixkv.cluster.feed import Kind, encode_load, encode_record
from radixkv.cluster.losses import Losses, RefusedError
from radixkv.cluster.run import _Membership
from radixkv.engine.clearing import NamespaceSelection
from radixkv.errors import DrainingError, QueueFullError, ReplicasLostError, RequestTooLargeError
from radixkv.prompts import Prompt
from radixkv.routing import Router

SECRET = "a secret of the replicas"
GREEDY = SamplingParams(temperature=0, max_tokens=10)
LOAD = {"draining": False, "num_queued_tokens": 0, "num_queued": 0, "num_decoding": 0}
Handler = Callable[[httpx.Request], Coroutine[None, None, httpx.Response]]


def line(token_id: int, finish_reason: str | None = None) -> bytes:
    output = [0, "x", [token_id], None, None, finish_reason, None]
    piece = {
        "outputs": [output],
        "finished": finish_reason is not None,
        "num_cached_tokens": 0,
        "prompt_logprobs": None,
    }
    return json.dumps(piece).encode() + b"\n"


class Body(httpx.AsyncByteStream):
    def __init__(self, parts: Callable[[], AsyncIterator[bytes]]) -> None:
        self._parts = parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for part in self._parts():
            yield part


def client_of(handler: Handler) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.MockTransport(handler), base_url="http://replica")


def refusal(kind: str, status: int = 503) -> httpx.Response:
    return httpx.Response(status, json={"error": "no room", "kind": kind, "retry_after": 1})


def answering(*parts: bytes) -> Handler:
    async def body() -> AsyncIterator[bytes]:
        for part in parts:
            yield part

    async def handler(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=Body(body))

    return handler


async def tokens(streams: ReplicaStreams, request_id: str = "one") -> list[int]:
    return [
        token_id
        async for delta in streams.generate(Prompt([1, 2, 3]), GREEDY, request_id)
        for token_id in delta.outputs[0].token_ids
    ]


async def until(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


class Cluster:
    """Replicas by their urls: each is up until it is told to hang, and then lets hear nothing more."""

    def __init__(self) -> None:
        self.made: list[httpx.AsyncClient] = []
        self.hung: set[str] = set()
        self.timeouts: list[float] = []
        self.answers: dict[str, Handler] = {}
        self.events: dict[str, list[bytes]] = {}

    def connect(self, url: str) -> httpx.AsyncClient:
        async def events() -> AsyncIterator[bytes]:
            for record in self.events.get(url, [encode_record(Kind.HELD), encode_load(LOAD)]):
                yield record
            await until(lambda: url in self.hung)
            raise httpx.ReadTimeout("planted")

        async def handler(request: httpx.Request) -> httpx.Response:
            if request.url.path in self.answers:
                return await self.answers[request.url.path](request)
            if request.url.path == "/description":
                self.timeouts.append(request.extensions["timeout"]["read"])
                if url in self.hung:
                    await asyncio.Event().wait()
                identity = {"block_size": 16, "model": "tiny"}
                capacity = {"num_blocks": 10, "max_num_seqs": 4}
                return httpx.Response(200, json={"instance": url, "identity": identity, "capacity": capacity})
            if request.url.path == "/events":
                return httpx.Response(200, stream=Body(events))
            if request.url.path == "/clear" and url == "http://broken":
                return httpx.Response(500)
            if request.url.path == "/clear":
                return httpx.Response(200, json={"namespaces": 1, "prefixes": 0, "blocks": 0})
            await asyncio.Event().wait()
            raise AssertionError

        self.made.append(client_of(handler))
        return self.made[-1]

    def replicas(self) -> ReplicaSet:
        return ReplicaSet(SECRET, connect=self.connect)


def llm_of(replicas: ReplicaSet, max_queue: int | None = None) -> ClusterLLM:
    loaded: Any = SimpleNamespace(
        name="tiny", max_model_len=100, vocab_size=50, eos_token_ids=frozenset(), tokenizer=None
    )
    return ClusterLLM(loaded, replicas, max_queue=max_queue)


# -- requests -------------------------------------------------------------------------------------------------------


def test_without_replicas_no_place_in_the_queue_is_lost() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = ReplicaSet(SECRET, connect=cluster.connect, wait_seconds=0.0)
        await replicas.add("a", "http://a")
        llm = llm_of(replicas, max_queue=0)
        await replicas.remove("a")
        for _ in range(6):  # there are 4 places
            with pytest.raises(ReplicasLostError, match="there is no replica"):
                await llm.submit([Prompt([1, 2])], SamplingParams(max_tokens=None))
        assert llm.num_unfinished == 0
        assert await llm.shutdown()

    asyncio.run(main())


def test_a_shutdown_ends_what_no_replica_has_accepted_yet() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        await replicas.add("a", "http://a")
        llm = llm_of(replicas)
        submitted = asyncio.ensure_future(llm.submit([Prompt([1, 2]), Prompt([3])], GREEDY))
        await until(lambda: llm.num_unfinished == 2)
        assert not await llm.shutdown()
        with pytest.raises(DrainingError):
            await asyncio.wait_for(submitted, 20)
        assert llm.num_unfinished == 0
        await replicas.close()

    asyncio.run(main())


def test_clearing_is_no_success_where_a_replica_does_not_confirm_it() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        await replicas.add("a", "http://a")
        await replicas.add("b", "http://broken")
        with pytest.raises(ReplicasLostError, match="did not confirm that they cleared their cache: 'b'"):
            await llm_of(replicas).clear(NamespaceSelection())
        await replicas.close()

    asyncio.run(main())


def test_what_was_begun_waits_for_a_replica_with_room() -> None:
    async def main() -> None:
        num_refusals = 0

        async def broken() -> AsyncIterator[bytes]:
            yield line(1)
            raise httpx.ReadError("planted")

        async def dying(request: httpx.Request) -> httpx.Response:
            if request.url.path == "/health":
                raise httpx.ConnectError("planted")
            router.remove("dying")
            del clients["dying"]
            clients["full"] = client_of(full)
            router.add("full")
            return httpx.Response(200, stream=Body(broken))

        async def full(request: httpx.Request) -> httpx.Response:
            nonlocal num_refusals
            if num_refusals < 2:
                num_refusals += 1
                return refusal("QueueFullError")
            return await answering(line(2, "length"))(request)

        router = Router(16)
        router.add("dying")
        clients = {"dying": client_of(dying)}
        assert await tokens(ReplicaStreams(router, clients, SECRET, wait_seconds=30)) == [1, 2]
        num_refusals = -(10**6)
        router, clients = Router(16), {"dying": client_of(dying)}
        router.add("dying")
        with pytest.raises(ReplicasLostError, match="'one' was begun, and no replica has room to go on with it"):
            await tokens(ReplicaStreams(router, clients, SECRET, wait_seconds=0))

    asyncio.run(main())


def test_a_token_makes_old_refusals_forgotten() -> None:
    losses, client = Losses("one", 4), client_of(answering())
    losses.note_refusal("a", client, RefusedError(QueueFullError("full", 1)))
    assert losses.refused_by({"a": client}) == {"a"}
    losses.progress()
    assert losses.refused_by({"a": client}) == set()
    assert losses.wait_until(0.0, 1.0) == 1.0


def test_a_cancelled_waiter_ends_nobody_else_s_trial() -> None:
    async def main() -> None:
        gate, num_begun = asyncio.Event(), 0

        async def dying(request: httpx.Request) -> httpx.Response:
            return httpx.Response(503 if request.url.path == "/health" else 200, content=b"")

        async def one_at_a_time() -> AsyncIterator[bytes]:
            nonlocal num_begun
            num_begun += 1
            await gate.wait()
            yield line(1, "length")

        async def handler(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Body(one_at_a_time))

        router = Router(16)
        for name in "ab":
            router.add(name)
        router.report("b", 100_000, 10, 100)  # so that "a" is the first choice
        other = client_of(handler)
        streams = ReplicaStreams(router, {"a": client_of(dying), "b": other}, SECRET)
        tasks = [asyncio.ensure_future(tokens(streams, f"{number}")) for number in range(3)]
        await until(lambda: streams.num_streams("b") == 3 and num_begun == 1)
        tasks[1].cancel()
        await until(tasks[1].done)
        for _ in range(20):
            await asyncio.sleep(0)
        assert num_begun == 1
        gate.set()
        assert [await tasks[0], await tasks[2]] == [[1], [1]]
        assert not streams._tickets
        assert not streams._trials

    asyncio.run(main())


def test_what_is_too_large_for_one_replica_may_fit_into_another() -> None:
    async def small(request: httpx.Request) -> httpx.Response:
        return refusal("RequestTooLargeError", 400)

    async def main() -> None:
        router = Router(16)
        router.add("small")
        clients = {"small": client_of(small)}
        streams = ReplicaStreams(router, clients, SECRET, wait_seconds=30)
        with pytest.raises(RequestTooLargeError, match="no room"):
            await tokens(streams)
        clients["large"] = client_of(answering(line(1, "length")))
        router.add("large")
        router.report("large", 100_000, 10, 100)  # so that the small one is asked first
        assert await tokens(streams) == [1]

    asyncio.run(main())


def test_an_answer_is_read_to_the_end_of_its_response() -> None:
    async def main() -> None:
        ended = asyncio.Event()

        async def body() -> AsyncIterator[bytes]:
            yield line(1, "length")
            await asyncio.sleep(0)
            ended.set()

        async def handler(request: httpx.Request) -> httpx.Response:
            return httpx.Response(200, stream=Body(body))

        router = Router(16)
        router.add("a")
        assert await tokens(ReplicaStreams(router, {"a": client_of(handler)}, SECRET)) == [1]
        assert ended.is_set()

    asyncio.run(main())


# -- membership -----------------------------------------------------------------------------------------------------


def test_a_changed_url_replaces_the_replica_of_that_name() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        membership = _Membership(replicas, {"a": "http://a", "b": "http://b"})
        await membership.wait_for_first()
        await until(lambda: replicas.available == ["a", "b"])
        membership._update({"a": "http://new", "b": "http://b"})
        membership._update({"a": "http://newer", "b": "http://b"})  # while the first change is under way
        await until(lambda: not membership._changing and not membership._leaving)
        assert sorted(replicas.available) == ["a", "b"]
        assert replicas._members["a"].url == "http://newer"
        membership._update({"b": "http://b"})
        await until(lambda: replicas.names == ["b"] and not membership._changing)
        await membership.close()
        await replicas.close()
        assert all(client.is_closed for client in cluster.made)

    asyncio.run(main())


def test_a_removed_replica_s_streams_are_not_those_of_its_successor() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        await replicas.add("a", "http://a")
        first = asyncio.ensure_future(tokens(replicas.streams))
        await until(lambda: replicas.streams.num_streams("a"))
        removal = asyncio.ensure_future(replicas.remove("a"))  # it waits: there is nowhere else
        await until(lambda: not replicas.names)
        assert replicas.streams.num_streams("a") == 0
        await replicas.add("a", "http://other")
        await asyncio.wait_for(removal, 20)
        assert replicas.streams.num_streams("a") == 1
        (ticket,) = replicas.streams._tickets[replicas._clients["a"]]
        ticket.check()
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await replicas.close()

    asyncio.run(main())


def test_a_replica_that_hangs_is_put_down_at_the_first_silence() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        await replicas.add("a", "http://a")
        client = replicas._clients["a"]
        cluster.hung.add("http://a")
        await until(lambda: not replicas.available)
        await until(lambda: client.is_closed)
        assert len(cluster.timeouts) == 1  # it was put down without another question
        cluster.hung.clear()
        await until(lambda: replicas.available == ["a"])
        member = replicas._members["a"]
        await replicas._describe(member, replicas._clients["a"])
        assert cluster.timeouts[-1] < cluster.timeouts[0]
        await replicas.close()
        assert all(each.is_closed for each in cluster.made)

    asyncio.run(main())


def test_removing_a_replica_ends_the_wait_for_it() -> None:
    async def main() -> None:
        cluster = Cluster()
        replicas = cluster.replicas()
        cluster.hung.add("http://a")
        adding = asyncio.ensure_future(replicas.add("a", "http://a"))
        await until(lambda: cluster.timeouts)
        await replicas.remove("a")
        with pytest.raises(ConnectionError, match="replica 'a' was removed before it was up"):
            await asyncio.wait_for(adding, 20)
        assert all(client.is_closed for client in cluster.made)

    asyncio.run(main())


def test_events_that_nobody_understands_put_a_replica_down(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        cluster = Cluster()
        cluster.events["http://a"] = [encode_record(Kind.HELD), encode_load(LOAD), encode_load({"draining": False})]
        replicas = cluster.replicas()
        await replicas.add("a", "http://a")
        await until(lambda: not replicas.available)
        await replicas.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(main())
    assert "replica 'a' cannot be followed" in caplog.text


def test_without_tls_no_certificates_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("certificates were read")

    monkeypatch.setattr("ssl.SSLContext.load_verify_locations", refuse)
    monkeypatch.setattr("ssl.create_default_context", refuse)
    for url in ("unix:///tmp/a.sock", "http://127.0.0.1:9"):
        assert connect(url).timeout.connect is not None


# -- replicas -------------------------------------------------------------------------------------------------------


def test_a_reader_that_leaves_while_its_feed_begins_is_forgotten() -> None:
    async def main() -> None:
        observers: list[object] = []
        cache = SimpleNamespace(
            block_size=16, block_hashes=list, add_observer=observers.append, remove_observer=observers.remove
        )
        begun = asyncio.Event()

        class Llm:
            death = None

            async def call(self, function: Callable[[Any], Any]) -> Any:
                result = function(SimpleNamespace(cache=cache))
                if not begun.is_set():
                    begun.set()
                    await asyncio.Event().wait()
                return result

        llm: Any = Llm()
        announcements = Announcements(llm)
        reading = asyncio.ensure_future(anext(announcements.subscribe()))
        await begun.wait()
        assert observers
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        await until(lambda: not observers)
        assert not announcements._wakers

    asyncio.run(main())
