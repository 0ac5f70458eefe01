"""A client of one replica, and the secret that replicas and ingresses share."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from functools import cache, partial
from urllib.parse import SplitResult, urlsplit

import aiohttp
import httpx
from aiohttp.connector import AddrInfoType
from httpx_aiohttp import AiohttpTransport
from httpx_aiohttp.transport import AiohttpResponseStream

from radixkv.server.transport.listener import enable_keepalive

_EXPECTED_URL = "expected http://host:port or unix:///path"
# For most calls. A replica may have to read its model's files, or to wait for the end of a step.
SECONDS_TO_ANSWER = 120.0
_SECONDS_TO_CONNECT = 5.0
# Shorter than the replica's server keeps an idle connection, so that no request is sent on one that is being closed.
_SECONDS_TO_KEEP = 2.0
# aiohttp takes 0 for no limit.
_LIMITS = httpx.Limits(max_connections=0, keepalive_expiry=_SECONDS_TO_KEEP)


@contextmanager
def _errors_of_httpx() -> Iterator[None]:
    """Raise httpx's error for a lost or refused connection that the transport leaves as aiohttp's or takes for a timeout."""
    try:
        yield
    except httpx.ConnectTimeout as error:
        if isinstance(error.__cause__, TimeoutError):
            raise
        refused = isinstance(error.__cause__, aiohttp.ClientConnectorError)
        raise (httpx.ConnectError if refused else httpx.NetworkError)(str(error)) from error
    except aiohttp.ClientError as error:
        raise httpx.RemoteProtocolError(str(error)) from error


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Retrieve the error that ended a connection, or it would be logged: it was raised where the connection was read."""
    if not closed.cancelled():
        closed.exception()


class _Body(httpx.AsyncByteStream):
    """A response's body.

    aiohttp closes a connection with a malformed chunk, but does not end the body: its reader would wait forever.
    """

    def __init__(self, body: AiohttpResponseStream) -> None:
        self._body = body
        response = body._aiohttp_response
        self._content = response.content
        # None: the whole body has been received, and the connection serves other requests.
        protocol = None if response.connection is None else response.connection.protocol
        self._closed = None if protocol is None else protocol.closed
        if self._closed is not None:
            self._closed.remove_done_callback(_retrieve)  # added for an earlier response
            self._closed.add_done_callback(_retrieve)
            self._closed.add_done_callback(self._end)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        with _errors_of_httpx():
            async for data in self._body:
                yield data

    async def aclose(self) -> None:
        if self._closed is not None:
            self._closed.remove_done_callback(self._end)
        with _errors_of_httpx():
            await self._body.aclose()

    def _end(self, _: asyncio.Future[None]) -> None:
        if not self._content.is_eof() and self._content.exception() is None:
            self._content.set_exception(aiohttp.ClientPayloadError("the response's body is malformed"))


class _Transport(AiohttpTransport):
    """aiohttp beneath httpx: for many small pieces it needs a third of the processor time of httpx's own transport."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        with _errors_of_httpx():
            response = await super().handle_async_request(request)
        assert isinstance(response.stream, AiohttpResponseStream)
        response.stream = _Body(response.stream)
        return response


def check_secret(secret: str) -> None:
    """Refuse a secret that is easily guessed, or cannot be sent in a header. The error does not show it.

    Raises:
        TypeError: it is not a string.
        ValueError: it is too short, or a header would not bring it as it is.
    """
    if not isinstance(secret, str):
        raise TypeError(f"secret: expected a string, got a value of type {type(secret).__name__}")
    if len(secret) < 16 or not (secret.isascii() and secret.isprintable()):
        raise ValueError("secret: expected at least 16 printable ASCII characters")
    if secret.endswith(" "):  # HTTP drops it from a header's value
        raise ValueError("secret: expected no space at its end")


def check_url(url: str) -> SplitResult:
    """The parts of a replica's address.

    Args:
        url: ``http://host:port``, ``https://host:port`` or ``unix:///path``.

    Raises:
        ValueError: it is none of these.
    """
    try:
        httpx.URL(url)  # refuses what is not a host name
        parts = urlsplit(url)
        is_socket = parts.scheme == "unix" and parts.path.strip("/") and not parts.netloc
        is_host = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except (ValueError, httpx.InvalidURL) as error:
        raise ValueError(f"url: {_EXPECTED_URL}, got {url!r}: {error}") from error
    if not (is_socket or is_host) or set("@ ") & set(parts.netloc) or set("?#") & set(url):
        raise ValueError(f"url: {_EXPECTED_URL}, got {url!r}")
    return parts


def connect(url: str) -> httpx.AsyncClient:
    """A client of a replica.

    Raises:
        ValueError: `check_url` refuses the url.
    """
    parts = check_url(url)
    # Reading the certificates takes the event loop tens of milliseconds, and without TLS they are not needed.
    if parts.scheme == "unix":
        transport = _Transport(uds=parts.path, limits=_LIMITS, verify=False)
        base_url = "http://replica"
    else:
        verify = _tls() if parts.scheme == "https" else False
        transport, base_url = _Transport(client=partial(_session, verify), verify=False), url
    timeout = httpx.Timeout(None, connect=_SECONDS_TO_CONNECT)
    return httpx.AsyncClient(transport=transport, base_url=base_url, timeout=timeout)


def _session(tls: ssl.SSLContext | bool) -> aiohttp.ClientSession:
    """As httpx_aiohttp makes it, with sockets that notice when a replica is gone."""
    connector = aiohttp.TCPConnector(
        limit=0, keepalive_timeout=_SECONDS_TO_KEEP, ssl=tls, socket_factory=_connection_socket
    )
    return aiohttp.ClientSession(connector=connector)


def _connection_socket(address: AddrInfoType) -> socket.socket:
    family, kind, protocol, _, _ = address
    connection = socket.socket(family, kind, protocol)
    enable_keepalive(connection)
    return connection


@cache
def _tls() -> ssl.SSLContext:
    return httpx.create_ssl_context()
