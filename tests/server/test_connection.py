"""Clients that take their time: half a request, endless headers, an answer that is not read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from radixkv.server.connection import ConnectionLimits, LimitedProtocol

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

    def call_later(self, delay: float, callback: Callable[[], None]) -> Timer:
        self.timers.append(Timer(delay, callback))
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

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = self.aborted = True

    def is_closing(self) -> bool:
        return self.closed

    def get_extra_info(self, name: str) -> None:
        return None

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


class Connection:
    """A client's connection to an application that reads the body, and answers when it is told to."""

    def __init__(self) -> None:
        self.loop, self.transport, self.may_answer = Loop(), Transport(), asyncio.Event()
        self.received: list[bytes] = []
        config = uvicorn.Config(self._answer, interface="asgi3", log_config=None, lifespan="off")
        config.load()
        self.protocol = LimitedProtocol(
            ConnectionLimits(receive_timeout=60, send_timeout=30),
            config=config,
            server_state=ServerState(),
            app_state={},
            _loop=self.loop,
        )
        self.protocol.connection_made(self.transport)  # type: ignore[arg-type]

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        while scope["path"] != "/refused":
            message = await receive()
            self.received.append(message.get("body", b""))
            if message["type"] == "http.disconnect":
                return
            if not message["more_body"]:
                await self.may_answer.wait()
                break
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
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
    """Half a request held its connection for ever."""

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
        # Of the next one only a part arrives, while this one is not answered yet.
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
