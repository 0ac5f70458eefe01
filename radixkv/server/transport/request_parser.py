"""A parser of requests for a server that switches to no other protocol."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from types import SimpleNamespace

from httptools import HttpParserUpgrade, HttpRequestParser


class OneProtocolParser(HttpRequestParser):
    """httptools' parser, but it also reads the body of a request that asks for another protocol.

    httptools ends such a request at its headers. But a server that does not know the protocol ignores the `Upgrade` (RFC
    9110, 7.8), and the body follows as usual: Java's client asks for HTTP/2 with every request that it sends without TLS.

    Args:
        protocol: what httptools calls.
        read_body: called with what came behind such headers; it must give the protocol another parser.
    """

    def __init__(self, protocol: object, read_body: Callable[[bytes], None]) -> None:
        super().__init__(protocol)
        # As uvicorn does: what comes behind a request that closes its connection is no error.
        self.set_dangerous_leniencies(lenient_data_after_close=True)
        self._read_body = read_body

    def feed_data(self, data: bytes | bytearray | memoryview[int] | array[int]) -> None:
        try:
            super().feed_data(data)
        except HttpParserUpgrade as upgrade:
            self._read_body(bytes(memoryview(data)[upgrade.args[0] :]))


class BodyParser(HttpRequestParser):
    """Parses the body of a request whose headers another parser has read.

    Args:
        on_body: called with each part.
        on_message_complete: called at the end.
    """

    def __init__(self, on_body: Callable[[bytes], None], on_message_complete: Callable[[], None]) -> None:
        super().__init__(SimpleNamespace(on_body=on_body, on_message_complete=on_message_complete))

    def begin(self, headers: list[tuple[bytes, bytes]]) -> None:
        """Parse the body by a request's headers, whose names are in lower case."""
        framing = [b"%b: %b\r\n" % each for each in headers if each[0] in (b"content-length", b"transfer-encoding")]
        self.feed_data(b"POST / HTTP/1.1\r\n" + b"".join(framing) + b"\r\n")
