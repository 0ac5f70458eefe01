"""TLS connections, counted from before their handshake.

The event loop's own TLS would count them only afterwards, but a client that never begins to encrypt holds a file descriptor
until the handshake times out. So it counts as a connection without a request, the first kind to be given up.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, cast

from radixkv.server.config import ServerConfig
from radixkv.server.transport.connection import ConnectionLimits, LimitedProtocol


def tls_context(config: ServerConfig) -> ssl.SSLContext | None:
    """What a server encrypts with; None: it does not.

    Raises:
        ValueError: an option cannot be used; the message names it.
    """
    if config.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    option = f"ssl_certfile: {config.ssl_certfile} with ssl_keyfile {config.ssl_keyfile}"
    try:
        # Without a function, OpenSSL would ask the terminal for the password.
        context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile, lambda: config.ssl_keyfile_password or "")
        if config.ssl_ca_certs is not None:
            option = f"ssl_ca_certs: {config.ssl_ca_certs}"
            context.load_verify_locations(config.ssl_ca_certs)
            context.verify_mode = ssl.CERT_REQUIRED
        if config.ssl_ciphers is not None:
            option = f"ssl_ciphers: {config.ssl_ciphers!r:.80}"
            context.set_ciphers(config.ssl_ciphers)
    except OSError as error:
        raise ValueError(f"{option} cannot be used: {error}") from error
    return context


class TlsConnection(asyncio.Protocol):
    """A client's connection until it is encrypted; from then on it is a `LimitedProtocol`'s.

    Args:
        limits: of every connection; the handshake may take as long as a request may take to arrive.
        context: see `tls_context`.
        options: of `LimitedProtocol`.
    """

    def __init__(self, limits: ConnectionLimits, context: ssl.SSLContext, **options: Any) -> None:
        self._limits = limits
        self._context = context
        self._options = options
        self._received: list[bytes] = []
        self._protocol: LimitedProtocol | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Count the connection, and begin the handshake."""
        self._transport = cast(asyncio.Transport, transport)
        self._limits.open_connections.opened(self)
        self._accepting = asyncio.get_running_loop().create_task(self._accept())

    def data_received(self, data: bytes) -> None:
        """Keep the first decrypted data: asyncio's own loop does not wait until `_accept` goes on."""
        self._received.append(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass on a loss that was scheduled before the protocol changed, and happens afterwards."""
        if self._protocol is not None:
            self._protocol.connection_lost(exc)

    def give_up(self) -> None:
        """Close the connection at once."""
        self._transport.abort()

    async def _accept(self) -> None:
        try:
            if self._transport.is_closing():
                return
            encrypted = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._limits.receive_timeout,
            )
        except OSError:  # it is closed: the client speaks no TLS, took too long, or is gone
            return
        finally:
            self._limits.open_connections.closed(self)
        if encrypted is None or encrypted.is_closing():
            return
        self._protocol = LimitedProtocol(self._limits, **self._options)
        encrypted.set_protocol(self._protocol)
        self._protocol.connection_made(encrypted)
        for data in self._received:
            self._protocol.data_received(data)
