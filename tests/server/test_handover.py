"""One server succeeds another on the same port, and clients that connect meanwhile are answered by either."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from support.time_limit import HANGING

from radixkv.server.transport.handover import Handover
from radixkv.server.transport.listener import tcp_listener

REQUEST = b"GET /name HTTP/1.1\r\nhost: localhost\r\n\r\n"
STREAM = b"GET /stream HTTP/1.1\r\nhost: localhost\r\n\r\n"


class Server:
    """A server that says its name, and begins a stream whose end a test allows."""

    def __init__(self, name: str, port: int) -> None:
        self.end_of_stream = asyncio.Event()

        async def say(request: Request) -> Response:
            return Response(name)

        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            await self.end_of_stream.wait()
            yield b"ended"

        async def stream(request: Request) -> Response:
            return StreamingResponse(parts())

        app = Starlette(routes=[Route("/name", say), Route("/stream", stream)])
        self.handover = Handover(app)
        self._listening = tcp_listener("127.0.0.1", port, shared=True)
        self.listener = self._listening.__enter__()
        self.port: int = self.listener.getsockname()[1]
        self.uvicorn = uvicorn.Server(uvicorn.Config(self.handover, lifespan="off", log_config=None, ws="none"))
        self.serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self.serving = asyncio.ensure_future(self.uvicorn.serve([self.listener]))
        while not self.uvicorn.started:
            await asyncio.sleep(0)

    async def stop(self) -> None:
        assert self.serving is not None
        self.end_of_stream.set()
        self.uvicorn.should_exit = True
        await self.serving
        self._listening.__exit__(None, None, None)


@asynccontextmanager
async def old_server() -> AsyncIterator[Server]:
    server = Server("old", 0)
    await server.start()
    async with asyncio.timeout(HANGING):
        try:
            yield server
        finally:
            await server.stop()


async def response(reader: asyncio.StreamReader) -> tuple[str, bytes]:
    """The header and the body of a response with a known length."""
    header = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    length = next(int(line.split(": ")[1]) for line in header.split("\r\n") if line.startswith("content-length"))
    return header, await reader.readexactly(length)


def run(main: object) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(main())  # type: ignore[operator]


def test_a_connection_that_was_not_accepted_yet_is_answered() -> None:
    async def main() -> None:
        async with old_server() as old:
            with socket.create_connection(("127.0.0.1", old.port)) as waiting:  # the loop has not run since
                waiting.sendall(REQUEST)
                await old.handover.begin(old.uvicorn, old.listener)
                waiting.setblocking(False)
                reader, writer = await asyncio.open_connection(sock=waiting)
                header, body = await response(reader)
                assert (body, "connection: close" in header) == (b"old", True)
                assert await reader.read() == b""
                writer.close()

    run(main)


def test_a_connected_client_gets_one_more_answer_and_then_reaches_the_successor() -> None:
    async def main() -> None:
        async with old_server() as old:
            reader, writer = await asyncio.open_connection("127.0.0.1", old.port)
            writer.write(REQUEST)
            assert "connection: close" not in (await response(reader))[0]
            successor = Server("new", old.port)
            await successor.start()
            begun = asyncio.ensure_future(old.handover.begin(old.uvicorn, old.listener))
            while not old.handover._begun:
                await asyncio.sleep(0)
            writer.write(REQUEST)
            assert "connection: close" in (await response(reader))[0]
            assert await reader.read() == b""
            await begun
            assert not old.uvicorn.server_state.connections
            for _ in range(8):
                reader, writer = await asyncio.open_connection("127.0.0.1", old.port)
                writer.write(REQUEST)
                assert (await response(reader))[1] == b"new"
                writer.close()
            await successor.stop()

    run(main)


def test_a_stream_goes_on_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("radixkv.server.transport.handover._SECONDS_TO_MOVE", 0.1)

    async def main() -> None:
        async with old_server() as old:
            reader, writer = await asyncio.open_connection("127.0.0.1", old.port)
            writer.write(STREAM)
            await reader.readuntil(b"begun")
            await old.handover.begin(old.uvicorn, old.listener)
            with pytest.raises(ConnectionRefusedError):
                await asyncio.open_connection("127.0.0.1", old.port)
            old.uvicorn.should_exit = True
            old.end_of_stream.set()
            assert b"ended" in await reader.read()
            writer.close()

    run(main)
