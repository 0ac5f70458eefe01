"""The HTTP client of a replica: pieces as they come, connections that are reused, and bodies that break off."""

from __future__ import annotations

import asyncio
import logging
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from support.pretended_replicas import answering, line, streams_over, tokens
from support.pretended_replicas import client_of as pretended
from support.time_limit import HANGING

from radixkv.cluster.connection import connect

_HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nX-Name: one\r\n\r\n"
_END = b"0\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Server:
    """Answers each request as it is told, on a Unix socket.

    Attributes:
        requests: the head and the body of each.
        num_connections: so far.
    """

    def __init__(self, path: Path, answer: Callable[[asyncio.StreamWriter, int], Awaitable[None]]) -> None:
        self.url = f"unix://{path}"
        self.requests: list[tuple[bytes, bytes]] = []
        self.num_connections = 0
        self._answer = answer

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(httpx.Headers(parsed(head)).get("content-length", 0))
                self.requests.append((head, await reader.readexactly(length)))
                await self._answer(writer, len(self.requests))
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


def parsed(head: bytes) -> list[tuple[bytes, bytes]]:
    lines = head.strip().split(b"\r\n")[1:]
    return [(name, value) for name, _, value in (line.partition(b": ") for line in lines)]


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8100",
        "ftp://localhost",
        "unix://relative",
        "unix:///",
        "unix:///socket?query",
        "http://localhost:81OO",
        "http://localhost:99999",
        "http://localhost:-1",
        "http://localhost:0",
        "http://:80",
        "http://[::1",
        "http://local host",
        "http://höst..:80",
        "http://localhost/path",
        "http://localhost/?query",
        "http://localhost#fragment",
        "http://user:password@localhost",
    ],
)
def test_an_impossible_url_is_refused(url: str) -> None:
    """Where httpx found the bad port, it raised no ValueError, and an ingress waited for the replica for ever."""
    with pytest.raises(ValueError, match=f"url: expected http://host:port or unix:///path, got {re.escape(repr(url))}"):
        connect(url)


@asynccontextmanager
async def client_of(
    path: Path, answer: Callable[[asyncio.StreamWriter, int], Awaitable[None]]
) -> AsyncIterator[tuple[Server, httpx.AsyncClient]]:
    server = Server(path, answer)
    listening = await asyncio.start_unix_server(server.serve, path)
    async with connect(server.url) as client:
        yield server, client
    listening.close()


async def whole(writer: asyncio.StreamWriter, number: int) -> None:
    writer.write(_HEAD + chunk(b"answer ") + chunk(str(number).encode()) + _END)


async def test_a_connection_serves_again_after_a_response_that_was_read_to_its_end(tmp_path: Path) -> None:
    async with client_of(tmp_path / "s", whole) as (server, client):
        answers = [await client.post("/generate?a=b", content=b"prompt", headers={"X-A": "1"}) for _ in range(3)]
    assert [answer.content for answer in answers] == [b"answer 1", b"answer 2", b"answer 3"]
    assert answers[0].headers["x-name"] == "one"
    head, body = server.requests[2]
    assert head.startswith(b"POST /generate?a=b HTTP/1.1\r\n")
    assert body == b"prompt"
    assert (b"x-a", b"1") in parsed(head)
    assert server.num_connections == 1


async def test_a_response_that_is_left_early_ends_its_connection(tmp_path: Path) -> None:
    ended = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        if number > 1:
            await whole(writer, number)
            return
        writer.write(_HEAD + chunk(b"begun"))
        try:
            while True:
                writer.write(chunk(b"more"))
                await writer.drain()
                await asyncio.sleep(0)
        except ConnectionError:
            ended.set()
            raise

    async with client_of(tmp_path / "s", answer) as (server, client):
        async with client.stream("GET", "/") as response:
            assert (await anext(response.aiter_bytes())).startswith(b"begun")
        await asyncio.wait_for(ended.wait(), 600)
        assert (await client.get("/")).content == b"answer 2"
        assert server.num_connections == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        _HEAD + chunk(b"begun"),
        b"no such thing\r\n\r\n",
        _HEAD + b"no length\r\n",
        b"HTTP/1.1 200 OK\r\nno header\r\n\r\n",
    ],
    ids=["nothing", "half", "no response", "no chunk", "no header"],
)
async def test_a_broken_response_is_an_error(tmp_path: Path, sent: bytes) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(sent)
        await writer.drain()
        writer.close()

    async with client_of(tmp_path / "s", answer) as (_, client):
        with pytest.raises(httpx.TransportError) as error:
            await client.get("/")
    assert not isinstance(error.value, httpx.ConnectError)  # the server has had the request


async def test_a_malformed_chunk_in_the_middle_is_an_error_at_once(tmp_path: Path) -> None:
    begun = asyncio.Event()

    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(_HEAD + chunk(b"begun"))
        await begun.wait()
        writer.write(b"no length\r\n")
        await asyncio.Event().wait()  # the connection stays open at this end

    async with client_of(tmp_path / "s", answer) as (_, client), client.stream("GET", "/") as response:
        pieces = response.aiter_bytes()
        assert await anext(pieces) == b"begun"
        begun.set()
        with pytest.raises(httpx.ReadError, match="malformed"):
            await asyncio.wait_for(anext(pieces), HANGING)


async def test_silence_and_refused_connections_are_errors(tmp_path: Path) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(_HEAD + chunk(b"begun"))

    async with client_of(tmp_path / "s", answer) as (_, client):
        with pytest.raises(httpx.ReadTimeout):
            await client.get("/", timeout=httpx.Timeout(None, read=0.01))
    async with connect(f"unix://{tmp_path / 'none'}") as client:
        with pytest.raises(httpx.ConnectError):
            await client.get("/")


async def test_a_closed_client_ends_what_is_read(tmp_path: Path) -> None:
    async def answer(writer: asyncio.StreamWriter, number: int) -> None:
        writer.write(_HEAD + chunk(b"begun"))

    async with client_of(tmp_path / "s", answer) as (_, client), client.stream("GET", "/") as response:
        pieces = response.aiter_bytes()
        assert await anext(pieces) == b"begun"
        await client.aclose()
        with pytest.raises((httpx.TransportError, RuntimeError)):
            await anext(pieces)


async def test_the_system_probes_connections_to_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    probed: list[socket.socket] = []
    monkeypatch.setattr("radixkv.cluster.connection.enable_keepalive", probed.append)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        async with connect(f"http://127.0.0.1:{port}") as client:
            assert (await client.get("/")).text == "ok"
    assert len(probed) == 1


async def test_what_a_host_that_is_cut_off_never_had_is_not_lost_there(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A request took one of its four attempts with it for each host that fell silent while it connected there."""
    with caplog.at_level(logging.INFO):
        connecting = asyncio.Event()
        monkeypatch.setattr("radixkv.cluster.connection.enable_keepalive", lambda _: connecting.set())
        with socket.create_server(("127.0.0.1", 0), backlog=0) as full:
            address = full.getsockname()
            with socket.create_connection(address):  # the system takes one, and answers no further ones
                client = connect(f"http://127.0.0.1:{address[1]}")
                answer = answering(line(7, "length"))
                streams = streams_over({"a": client, "b": pretended(answer)})
                reading = asyncio.ensure_future(tokens(streams))
                await connecting.wait()
                await asyncio.sleep(0)
                streams.abandon(client)
                assert await asyncio.wait_for(reading, HANGING) == [7]
                await client.aclose()
    assert "was lost" not in caplog.text


def test_without_tls_no_certificates_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("certificates were read")

    monkeypatch.setattr("ssl.SSLContext.load_verify_locations", refuse)
    monkeypatch.setattr("ssl.create_default_context", refuse)
    for url in ("unix:///tmp/a.sock", "http://127.0.0.1:9"):
        assert connect(url).timeout.connect is not None
