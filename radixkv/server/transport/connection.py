"""A connection's time limits: uvicorn has none for clients that send half a request, or do not read their answer."""

from __future__ import annotations

from asyncio import Transport
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from radixkv.server.errors import ApiError
from radixkv.server.middleware.request_log import ANSWER_HEADERS
from radixkv.server.transport.open_connections import OpenConnections
from radixkv.server.transport.request_parser import BodyParser, OneProtocolParser

if TYPE_CHECKING:
    from asyncio import TimerHandle

# How much longer than twice its body a request may be: request line, headers, and what separates chunks.
_MAX_OVERHEAD_BYTES = 64 << 10


@dataclass(frozen=True)
class ConnectionLimits:
    """How long a client may take.

    Attributes:
        receive_timeout: seconds until a request has arrived, headers and body; then it is answered 408.
        send_timeout: seconds for which a client may read nothing of an answer that waits; then the connection is closed.
        open_connections: what all connections together may take.
    """

    receive_timeout: float
    send_timeout: float
    open_connections: OpenConnections = field(default_factory=OpenConnections)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with time limits and a limit of the headers' length.

    When a client disconnects, its request is aborted. To notice that, reading goes on during an answer. So a request that
    comes before the answer's end (HTTP pipelining) is dropped, and the connection is closed after the answer, as RFC 9112
    (9.3.2) allows.

    Args:
        limits: of every connection.
        options: as uvicorn passes them.
    """

    def __init__(self, limits: ConnectionLimits, **options: Any) -> None:
        super().__init__(**options)
        self.parser = OneProtocolParser(self, self._read_body)
        self._limits = limits
        self._receiving: TimerHandle | None = None
        self._sending: TimerHandle | None = None
        self._overhead = 0
        self._drops_input = False

    # -- receiving -----------------------------------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._begin_receiving()
        self._limits.open_connections.opened(self)

    def data_received(self, data: bytes) -> None:
        if self._drops_input:
            return
        if self._receiving is None:  # the next request on this connection
            self._begin_receiving()
        self._overhead += len(data)
        super().data_received(data)
        if self._overhead > _MAX_OVERHEAD_BYTES and not self.transport.is_closing():
            limit = f"the request's headers are longer than {_MAX_OVERHEAD_BYTES} bytes"
            self._refuse(ApiError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, limit))

    def on_headers_complete(self) -> None:
        answered = self.cycle
        super().on_headers_complete()
        if self.scope["http_version"] < "1.1":
            _send_without_chunks(self.cycle)
        if self.pipeline:
            self.pipeline.clear()
            self.cycle = answered
            answered.keep_alive = False
            self._drops_input = True
            self._end_receiving()
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        if self._drops_input:
            return
        self._overhead -= 2 * len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self._drops_input or self.parser.should_upgrade():  # the second has a body nevertheless
            return
        super().on_message_complete()
        self._overhead = 0
        self._end_receiving()
        if not self.cycle.response_complete:
            self._limits.open_connections.busy(self)

    def _should_upgrade(self) -> bool:
        return False

    def _read_body(self, data: bytes) -> None:
        """Read the body of a request that asks for another protocol. It is the last one on its connection."""
        if self._drops_input:
            return
        self.cycle.keep_alive = False
        self.parser = BodyParser(self.on_body, self._on_last_message_complete)
        self.parser.begin(self.headers)
        self.parser.feed_data(data)

    def _on_last_message_complete(self) -> None:
        self.on_message_complete()
        self._drops_input = True

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(HTTPStatus.BAD_REQUEST, "the request is not HTTP/1.1"))

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete:  # otherwise the next request has begun
            self._limits.open_connections.idle(self)

    def _begin_receiving(self) -> None:
        self._receiving = self.loop.call_later(self._limits.receive_timeout, self._on_receive_timeout)

    def _end_receiving(self) -> None:
        if self._receiving is not None:
            self._receiving.cancel()
            self._receiving = None

    def _on_receive_timeout(self) -> None:
        cycle = self.cycle
        answering = cycle is not None and not cycle.more_body and not cycle.response_complete
        if answering or self.flow.read_paused:  # the next request has to wait for the server, not for the client
            self._begin_receiving()
            return
        self._receiving = None
        seconds = f"{self._limits.receive_timeout:g} seconds"
        self._refuse(
            ApiError(HTTPStatus.REQUEST_TIMEOUT, f"the request did not arrive within {seconds}", code="timeout")
        )

    def _refuse(self, error: ApiError) -> None:
        """Close the connection, with an answer unless this request got one."""
        if self.transport.is_closing():
            return
        cycle = self.cycle
        if cycle is None or not cycle.response_started or (cycle.response_complete and not cycle.more_body):
            body = error.body.model_dump_json().encode()
            state = {} if cycle is None or cycle.response_complete else cycle.scope["state"]
            ids = "".join(f"{header}: {state['request_id']}\r\n" for header in ANSWER_HEADERS if "request_id" in state)
            head = f"HTTP/1.1 {error.status.value} {error.status.phrase}\r\nContent-Type: application/json\r\n{ids}"
            head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()

    # -- sending -------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()
        self._limits.open_connections.unread(self, self.transport.get_write_buffer_size())

    def resume_writing(self) -> None:
        self._limits.open_connections.read(self)
        self._end_sending()
        super().resume_writing()

    def _await_reader(self) -> None:
        unsent = self.transport.get_write_buffer_size()
        self._sending = self.loop.call_later(self._limits.send_timeout, self._on_send_timeout, unsent)

    def _end_sending(self) -> None:
        if self._sending is not None:
            self._sending.cancel()
            self._sending = None

    def _on_send_timeout(self, unsent_before: int) -> None:
        if self.transport.get_write_buffer_size() < unsent_before:
            self._await_reader()
            return
        self._sending = None
        self.give_up()

    def give_up(self) -> None:
        """Close the connection at once; what is not sent yet is dropped."""
        self.transport.abort()  # `close` would wait until all is sent

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_receiving()
        self._end_sending()
        self._limits.open_connections.closed(self)
        super().connection_lost(exc)


def _send_without_chunks(cycle: RequestResponseCycle) -> None:
    """Answer a client of HTTP/1.0, which has no chunks (RFC 9112, 6.1): the connection's end is that of the answer."""
    send = cycle.send

    async def send_as_it_is(message: Any) -> None:
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.chunked_encoding = False
    cycle.send = send_as_it_is  # type: ignore[method-assign]
