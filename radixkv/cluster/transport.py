"""HTTP to a replica over asyncio and httptools: what answers of many small pieces need of it.

httpx's own transport passes each piece through a dozen generators, and asks all connections for each request whether
they have expired; for an ingress of 32 streams that was two fifths of the processor time.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator
from typing import cast

import httptools
import httpx

# Sooner than the replica's server closes an idle connection: a request must not meet its end.
_SECONDS_IDLE = 2.0
# That wait for their reader; beyond, the replica waits, too.
_MAX_WAITING_BYTES = 1 << 16


class ReplicaTransport(httpx.AsyncBaseTransport):
    """Connections to one replica, each for one request at a time; one whose response was read to its end serves the next.

    Args:
        address: path of a Unix socket, or host and port.
        tls: of a port; None: plain.
    """

    def __init__(self, address: str | tuple[str, int], tls: ssl.SSLContext | None = None) -> None:
        self._address = address
        self._tls = tls
        self._open: set[_Connection] = set()
        self._idle: deque[tuple[float, _Connection]] = deque()  # the oldest first

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send a request; the response's body is still to be read.

        Raises:
            httpx.TransportError: there is no response.
        """
        timeouts: dict[str, float | None] = request.extensions.get("timeout", {})
        body = await request.aread()
        connection = self._take_idle() or await self._connect(timeouts.get("connect"))
        try:
            connection.send(request, body)
            status, headers = await connection.response(timeouts.get("read"))
        except BaseException:
            connection.abort()
            raise
        return httpx.Response(status, headers=headers, stream=_Body(self, connection, timeouts.get("read")))

    async def aclose(self) -> None:
        """End all connections."""
        for connection in list(self._open):
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: _Connection) -> None:
        """Nobody reads its response any more."""
        if not connection.reusable:
            connection.abort()
            return
        self._drop_expired()
        self._idle.append((asyncio.get_running_loop().time(), connection))

    def _take_idle(self) -> _Connection | None:
        self._drop_expired()
        while self._idle:
            _, connection = self._idle.pop()
            if connection.reusable:
                return connection
        return None

    def _drop_expired(self) -> None:
        oldest = asyncio.get_running_loop().time() - _SECONDS_IDLE
        while self._idle and self._idle[0][0] < oldest:
            self._idle.popleft()[1].abort()

    async def _connect(self, timeout: float | None) -> _Connection:
        loop, address = asyncio.get_running_loop(), self._address

        def make() -> _Connection:
            return _Connection(self._open)

        try:
            async with asyncio.timeout(timeout):
                if isinstance(address, str):
                    _, connection = await loop.create_unix_connection(make, address)
                else:
                    _, connection = await loop.create_connection(make, *address, ssl=self._tls)
        except TimeoutError as error:
            raise httpx.ConnectTimeout(f"no connection after {timeout} seconds") from error
        except OSError as error:
            raise httpx.ConnectError(str(error)) from error
        return connection


class _Body(httpx.AsyncByteStream):
    """A response's body, as it comes."""

    def __init__(self, transport: ReplicaTransport, connection: _Connection, timeout: float | None) -> None:
        self._transport = transport
        self._connection: _Connection | None = connection
        self._timeout = timeout

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._connection is not None and (data := await self._connection.read(self._timeout)):
            yield data

    async def aclose(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._transport.give_back(connection)


class _Connection(asyncio.Protocol):
    """A connection, and the response that it receives.

    Args:
        among: the connections that are open, which it joins and leaves.
    """

    def __init__(self, among: set[_Connection]) -> None:
        self._among = among
        self._transport: asyncio.Transport | None = None  # None: it has ended
        self._parser = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._failure: httpx.TransportError | None = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._num_waiting = 0
        self._has_head = self._paused = self._stays_open = False
        self._complete = True

    @property
    def reusable(self) -> bool:
        """Whether its response was received to its end, and another request may follow."""
        return self._complete and self._stays_open and self._transport is not None

    def send(self, request: httpx.Request, body: bytes) -> None:
        """Begin a request; ``body`` is the whole of it."""
        self._headers, self._body, self._num_waiting = [], [], 0
        self._has_head = self._complete = self._stays_open = False
        head = [b"%b %b HTTP/1.1" % (request.method.encode(), request.url.raw_path)]
        head += [b"%b: %b" % header for header in request.headers.raw]
        if self._transport is not None:  # else `response` says why
            self._transport.write(b"\r\n".join(head) + b"\r\n\r\n" + body)

    async def response(self, timeout: float | None) -> tuple[int, list[tuple[bytes, bytes]]]:
        """The status and the headers.

        Raises:
            httpx.TransportError: there is none.
        """
        while not self._has_head:
            await self._wait(timeout)
        return self._parser.get_status_code(), self._headers

    async def read(self, timeout: float | None) -> bytes:
        """What has come of the body; nothing at its end.

        Raises:
            httpx.TransportError: it does not come to its end.
        """
        while not self._body and not self._complete:
            await self._wait(timeout)
        data = b"".join(self._body)
        self._body, self._num_waiting = [], 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return data

    def abort(self) -> None:
        """End it."""
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self, timeout: float | None) -> None:
        if self._failure is not None:
            raise self._failure
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            if timeout is None:
                await self._waiter
            else:
                async with asyncio.timeout(timeout):
                    await self._waiter
        except TimeoutError as error:
            raise httpx.ReadTimeout(f"nothing came for {timeout} seconds") from error
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # -- of asyncio ----------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._among.add(self)

    def data_received(self, data: bytes) -> None:
        try:
            if self._complete:
                raise httptools.HttpParserError("there is no request")
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._failure = httpx.RemoteProtocolError(f"expected the response to a request: {error}")
            self.abort()
        if self._num_waiting > _MAX_WAITING_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._failure is None:
            reason = "the connection ended before the response's end" if exc is None else repr(exc)
            self._failure = httpx.ReadError(reason)
        self._transport = None
        self._among.discard(self)
        self._wake()

    # -- of the parser -------------------------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._has_head = True

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        self._num_waiting += len(body)

    def on_message_complete(self) -> None:
        self._complete = True
        self._stays_open = self._parser.should_keep_alive()
