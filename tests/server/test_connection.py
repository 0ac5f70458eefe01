"""Clients that take their time: half a request, endless headers, an answer that is not read."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from radixkv.server.transport.connection import ConnectionLimits, LimitedProtocol
from radixkv.server.transport.open_connections import OpenConnections, possible_connections

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"


class Timer:
    """What a loop's `call_later` returns."""

    def __init__(self, delay: float, callback: Callable[[], None]) -> None:
        self.delay, self.callback, self.cancelled = delay, callback, False

    def cancel(self) -> None:
        self.cancelled = True


class Loop:
    """An event loop whose clock is moved by the test."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, delay: float, callback: Callable[..., None], *arguments: Any) -> Timer:
        self.timers.append(Timer(delay, partial(callback, *arguments)))
        return self.timers[-1]

    def create_task(self, *arguments: Any, **options: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(*arguments, **options)

    def expire(self, delay: float) -> bool:
        """Call the timer of this delay that is armed; False: none is."""
        armed = [timer for timer in self.timers if timer.delay == delay and not timer.cancelled]
        self.timers = [timer for timer in self.timers if timer not in armed]
        for timer in armed:
            timer.callback()
        return bool(armed)


class Transport:
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.written, self.closed, self.aborted = b"", False, False
        self.unsent = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A client's connection to an application that reads the body, and answers when it is told to."""

    def __init__(self, open_connections: OpenConnections | None = None) -> None:
        self.loop, self.transport, self.may_answer = Loop(), Transport(), asyncio.Event()
        self.received: list[bytes] = []
        config = uvicorn.Config(self._answer, interface="asgi3", log_config=None, lifespan="off")
        config.load()
        self.protocol = LimitedProtocol(
            ConnectionLimits(60, 30, open_connections or OpenConnections()),
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=self.loop,
        )
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["state"]["request_id"] = "named"
        while scope["path"] not in ("/refused", "/streamed"):
            message = await receive()
            self.received.append(message.get("body", b""))
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                await self.may_answer.wait()
                break
        streams = scope["path"] == "/streamed"
        headers = [] if streams else [(b"content-length", b"2")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for _ in range(3 * streams):
            await send({"type": "http.response.body", "body": b"part", "more_body": True})
        await send({"type": "http.response.body", "body": b"ok"})

    async def send(self, data: bytes) -> None:
        self.protocol.data_received(data)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(5):
            await asyncio.sleep(0)

    def assert_refused(self, status: int) -> None:
        head, _, body = self.transport.written.partition(b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode()), head
        assert b"Connection: close" in head
        assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}
        assert self.transport.closed


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD[:-4], HEAD, HEAD + b"12345678"])
def test_a_request_that_does_not_arrive_is_a_408(sent: bytes) -> None:
    """Half a request used to hold its connection for ever."""

    async def main() -> None:
        connection = Connection()
        await connection.send(sent)
        assert connection.transport.written == b""
        assert connection.loop.expire(60)
        connection.assert_refused(408)

    asyncio.run(main())


def test_a_request_that_arrived_has_all_the_time_of_the_world() -> None:
    async def main() -> None:
        connection = Connection()
        for part in (HEAD[:5], HEAD[5:], b"1234", b"56789"):
            await connection.send(part)
        assert not connection.loop.expire(60)
        assert b"".join(connection.received) == b"123456789"
        # Only a part of the next request arrives while this one is not answered yet.
        await connection.send(HEAD[:10])
        assert connection.loop.expire(60)
        assert not connection.transport.closed
        connection.may_answer.set()
        await connection.settle()
        assert connection.transport.written.endswith(b"\r\n\r\nok")
        connection.transport.written = b""
        assert connection.loop.expire(60)
        connection.assert_refused(408)

    asyncio.run(main())


def test_a_request_that_comes_before_an_answer_ends_is_dropped_with_the_connection() -> None:
    """It used to stop reading, and with it noticing that the client is gone: an answer that nobody reads ran to its end."""

    async def main() -> None:
        for rest in (b"", HEAD + b"123456789" + HEAD[:20], HEAD[:30]):
            connection = Connection()
            await connection.send(HEAD + b"123456789" + HEAD + b"abcde")
            for start in range(0, len(rest), 7):
                await connection.send(rest[start : start + 7])
            assert connection.received == [b"123456789"]
            assert not connection.protocol.flow.read_paused
            assert not connection.loop.expire(60)
            connection.may_answer.set()
            await connection.settle()
            assert connection.transport.written.count(b"HTTP/1.1 200 ") == 1
            assert connection.transport.closed
        gone = Connection()
        await gone.send(2 * (HEAD + b"123456789"))
        gone.protocol.connection_lost(None)
        assert gone.protocol.cycle.disconnected
        gone.may_answer.set()
        await gone.settle()
        assert gone.transport.written == b""

    asyncio.run(main())


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
@pytest.mark.parametrize("step", [1, 7, 1000])
def test_a_request_that_asks_for_another_protocol_is_answered_in_this_one(upgrade: str, step: int) -> None:
    """Its body was dropped, with advice to install a WebSocket library: Java's client could not talk to the server."""
    head = HEAD[:-2] + f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\n\r\n".encode()
    chunked = head.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")
    bodiless = head.replace(b"Content-Length: 9\r\n", b"").replace(b"POST", b"GET")

    async def main() -> None:
        for sent, body in (
            (head + b"123456789" + HEAD, b"123456789"),
            (chunked + b"5\r\nabcde\r\n4\r\nfghi\r\n0\r\n\r\n", b"abcdefghi"),
            (bodiless, b""),
        ):
            connection = Connection()
            for start in range(0, len(sent), step):
                await connection.send(sent[start : start + step])
            assert b"".join(connection.received) == body
            assert not connection.loop.expire(60)
            connection.may_answer.set()
            await connection.settle()
            assert connection.transport.written.count(b"HTTP/1.1 200 ") == 1
            assert connection.transport.written.endswith(b"ok")
            assert connection.transport.closed

    asyncio.run(main())


@pytest.mark.parametrize(("path", "body"), [("/streamed", b"partpartpartok"), ("/", b"ok")])
def test_a_client_of_http_1_0_gets_an_answer_without_chunks(path: str, body: bytes) -> None:
    """It took the lengths of chunks for parts of a streamed answer."""

    async def main() -> None:
        for method, expected in (("GET", body), ("HEAD", b"")):
            connection = Connection()
            connection.may_answer.set()
            await connection.send(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
            head, _, received = connection.transport.written.partition(b"\r\n\r\n")
            assert b"transfer-encoding" not in head
            assert (b"content-length: 2" in head) == (path == "/")
            assert received == expected
            assert connection.transport.closed

    asyncio.run(main())


def test_what_is_no_request_is_a_400_in_the_usual_form() -> None:
    async def main() -> None:
        for sent in (b"\x16\x03\x01\x02\x00\x01", HEAD.replace(b": 9", b": x"), b"GARBAGE\r\n\r\n"):
            connection = Connection()
            await connection.send(sent)
            connection.assert_refused(400)

    asyncio.run(main())


def test_who_was_answered_before_the_body_came_gets_no_second_answer() -> None:
    async def main() -> None:
        connection = Connection()
        await connection.send(HEAD.replace(b"/v1/completions", b"/refused") + b"123")
        answer = connection.transport.written
        assert answer.endswith(b"ok")
        assert connection.loop.expire(60)
        assert connection.transport.written == answer
        assert connection.transport.closed

    asyncio.run(main())


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"x" * 70_000,
        HEAD[:-2] + b"X: " + b"x" * 70_000,
        HEAD[:-2] + b"X: x\r\n" * 12_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n1;x" + b"x" * 70_000,
        b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: x\r\n" * 12_000,
    ],
    ids=["path", "one header", "many headers", "extension of a chunk", "trailers"],
)
def test_headers_are_bounded(sent: bytes) -> None:
    async def main() -> None:
        connection = Connection()
        for start in range(0, len(sent), 10_000):
            if not connection.transport.closed:
                await connection.send(sent[start : start + 10_000])
        connection.assert_refused(431)

    asyncio.run(main())


def test_a_long_body_in_chunks_is_none_of_that() -> None:
    async def main() -> None:
        connection = Connection()
        await connection.send(b"POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(100_000):
            connection.protocol.data_received(b"5\r\nabcde\r\n")
        await connection.send(b"0\r\n\r\n")
        connection.may_answer.set()
        await connection.settle()
        assert len(b"".join(connection.received)) == 500_000
        assert connection.transport.written.startswith(b"HTTP/1.1 200 ")
        assert connection.transport.written.endswith(b"ok")

    asyncio.run(main())


def test_a_client_that_does_not_read_is_disconnected() -> None:
    async def main() -> None:
        connection = Connection()
        await connection.send(HEAD + b"123456789")
        connection.protocol.pause_writing()
        connection.protocol.resume_writing()
        assert not connection.loop.expire(30)
        connection.protocol.pause_writing()
        connection.may_answer.set()
        await connection.settle()
        assert connection.transport.written == b""
        expired, aborted = connection.loop.expire(30), connection.transport.aborted
        connection.protocol.connection_lost(None)
        await connection.settle()
        assert expired
        assert aborted
        assert connection.protocol.cycle.disconnected

    asyncio.run(main())


def test_a_client_that_reads_slowly_is_not() -> None:
    """An answer that took longer to send than the limit used to be cut off, although the client read all the time."""

    async def main() -> None:
        connection = Connection()
        connection.transport.unsent = 3000
        connection.protocol.pause_writing()
        for unsent in (2000, 1999):
            connection.transport.unsent = unsent
            assert connection.loop.expire(30)
            assert not connection.transport.aborted
        assert connection.loop.expire(30)
        assert connection.transport.aborted

    asyncio.run(main())


def test_of_too_many_connections_those_without_a_request_are_closed() -> None:
    """A few thousand that sent nothing used to take all of the process's file descriptors, and nobody else could connect."""

    async def main() -> None:
        everyone = OpenConnections(max_connections=3)
        working, waiting, silent = (Connection(everyone) for _ in range(3))
        await working.send(HEAD + b"123456789")
        await waiting.send(HEAD + b"123456789")
        waiting.may_answer.set()
        await waiting.settle()
        fourth = Connection(everyone)
        assert [each.transport.aborted for each in (working, waiting, silent)] == [False, False, True]
        silent.protocol.connection_lost(None)
        fifth = Connection(everyone)
        assert [each.transport.aborted for each in (working, waiting, fourth)] == [False, True, False]
        waiting.protocol.connection_lost(None)
        await fourth.send(HEAD + b"123456789")
        await fifth.send(HEAD + b"123456789")
        assert Connection(everyone).transport.aborted
        assert not any(each.transport.aborted for each in (working, fourth, fifth))

    asyncio.run(main())


def test_of_many_connections_at_once_as_many_are_closed() -> None:
    """All those accepted in one turn of the event loop used to close the same one, and the others stayed."""

    async def main() -> None:
        everyone = OpenConnections(max_connections=3)
        burst = [Connection(everyone) for _ in range(7)]
        assert [each.transport.aborted for each in burst] == [True] * 4 + [False] * 3
        for each in burst[:4]:
            each.protocol.connection_lost(None)
        assert Connection(everyone).transport.aborted is False
        assert [each.transport.aborted for each in burst[4:]] == [True, False, False]

    asyncio.run(main())


def test_of_too_much_that_is_not_read_the_oldest_is_dropped() -> None:
    """Unread answers used to fill the memory: the size of each was bounded, but not their number."""

    async def main() -> None:
        everyone = OpenConnections(max_unsent_bytes=100)
        clients = [Connection(everyone) for _ in range(4)]
        for client in clients:
            client.transport.unsent = 40
        for client in clients[:2]:
            client.protocol.pause_writing()
        clients[0].protocol.resume_writing()
        for client in clients[2:]:
            client.protocol.pause_writing()
        assert [client.transport.aborted for client in clients] == [False, True, False, False]
        clients[1].protocol.connection_lost(None)
        clients[3].protocol.resume_writing()
        clients[0].protocol.pause_writing()
        assert not clients[2].transport.aborted

    asyncio.run(main())


def test_the_limit_of_open_files_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = [(1024, 1_000_000), (1024, 4096), (1024, 1024), (100, 100), (resource.RLIM_INFINITY,) * 2]
    raised: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda *arguments: raised.append(arguments))
    found = []
    for soft, hard in limits:
        monkeypatch.setattr(resource, "getrlimit", lambda which, both=(soft, hard): both)
        found.append(possible_connections())
    assert found == [16_384, 3840, 768, 1, 16_384]
    assert raised[:2] == [(resource.RLIMIT_NOFILE, (16_640, 1_000_000)), (resource.RLIMIT_NOFILE, (4096, 4096))]
