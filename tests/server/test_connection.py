"""Clients that take their time: half a request, endless headers, an answer that is not read."""

from __future__ import annotations

import pytest
from support.client_connections import HEAD, Connection


@pytest.mark.parametrize("sent", [b"", b"POST /v1/comp", HEAD[:-4], HEAD, HEAD + b"12345678"])
async def test_a_request_that_does_not_arrive_is_a_408(sent: bytes) -> None:
    """Half a request used to hold its connection for ever."""
    connection = Connection()
    if sent:  # otherwise the protocol is not called again
        await connection.send(sent)
    assert connection.transport.written == b""
    assert connection.loop.expire(60)
    connection.assert_refused(408)


async def test_a_request_that_arrived_has_all_the_time_of_the_world() -> None:
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


@pytest.mark.parametrize("pause", [False, True], ids=["at once", "later"])
async def test_a_request_that_comes_before_an_answer_ends_is_dropped_with_the_connection(pause: bool) -> None:
    """It used to stop reading, and with it noticing that the client is gone: an answer without a reader ran to its end."""
    for rest in (b"", HEAD + b"123456789" + HEAD[:20], HEAD[:30]):
        connection = Connection()
        for part in [HEAD + b"123456789", HEAD + b"abcde"] if pause else [HEAD + b"123456789" + HEAD + b"abcde"]:
            await connection.send(part)
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


@pytest.mark.parametrize("upgrade", ["h2c", "websocket"])
@pytest.mark.parametrize("step", [1, 7, 1000])
async def test_a_request_to_upgrade_the_protocol_is_answered_in_http_1_1(upgrade: str, step: int) -> None:
    """Its body was dropped, with advice to install a WebSocket library: Java's client could not talk to the server."""
    head = HEAD[:-2] + f"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: {upgrade}\r\n\r\n".encode()
    chunked = head.replace(b"Content-Length: 9", b"Transfer-Encoding: chunked")
    bodiless = head.replace(b"Content-Length: 9\r\n", b"").replace(b"POST", b"GET")
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


@pytest.mark.parametrize(("path", "body"), [("/streamed", b"partpartpartok"), ("/", b"ok")])
async def test_a_client_of_http_1_0_gets_an_answer_without_chunks(path: str, body: bytes) -> None:
    """It took the lengths of chunks for parts of a streamed answer."""
    for method, expected in (("GET", body), ("HEAD", b"")):
        connection = Connection()
        connection.may_answer.set()
        await connection.send(f"{method} {path} HTTP/1.0\r\n\r\n".encode())
        head, _, received = connection.transport.written.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert (b"content-length: 2" in head) == (path == "/")
        assert received == expected
        assert connection.transport.closed


async def test_what_is_no_request_is_a_400_in_the_usual_form() -> None:
    for sent in (b"\x16\x03\x01\x02\x00\x01", HEAD.replace(b": 9", b": x"), b"GARBAGE\r\n\r\n"):
        connection = Connection()
        await connection.send(sent)
        connection.assert_refused(400)


async def test_who_was_answered_before_the_body_came_gets_no_second_answer() -> None:
    connection = Connection()
    await connection.send(HEAD.replace(b"/v1/completions", b"/refused") + b"123")
    answer = connection.transport.written
    assert answer.endswith(b"ok")
    assert connection.loop.expire(60)
    assert connection.transport.written == answer
    assert connection.transport.closed


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
async def test_headers_are_bounded(sent: bytes) -> None:
    connection = Connection()
    for start in range(0, len(sent), 10_000):
        if not connection.transport.closed:
            await connection.send(sent[start : start + 10_000])
    connection.assert_refused(431)


async def test_a_long_body_in_chunks_is_none_of_that() -> None:
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


async def test_a_client_that_does_not_read_is_disconnected() -> None:
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


async def test_a_client_that_reads_slowly_is_not() -> None:
    """An answer that took longer to send than the limit used to be cut off, although the client read all the time."""
    connection = Connection()
    connection.transport.unsent = 3000
    connection.protocol.pause_writing()
    for unsent in (2000, 1999):
        connection.transport.unsent = unsent
        assert connection.loop.expire(30)
        assert not connection.transport.aborted
    assert connection.loop.expire(30)
    assert connection.transport.aborted


async def test_an_answer_goes_on_when_its_client_reads_again() -> None:
    connection = Connection()
    await connection.send(HEAD + b"123456789")
    connection.protocol.pause_writing()
    connection.may_answer.set()
    await connection.settle()
    assert connection.transport.written == b""
    connection.protocol.resume_writing()
    await connection.settle()
    assert connection.transport.written.endswith(b"\r\n\r\nok")
