"""A client's connection to the server, whose clock, transport and application are moved by a test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from radixkv.server.transport.connection import ConnectionLimits, LimitedProtocol
from radixkv.server.transport.open_connections import OpenConnections

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
