"""One replica's answer to one request, as it comes over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, suppress
from http import HTTPStatus
from typing import Any, TypeGuard

import httpx

from radixkv.cluster.losses import LostError, RefusedError
from radixkv.cluster.wire import error_of, has_crashed, refusal_of
from radixkv.errors import DrainingError, NoBlocksLeftError, QueueFullError, RequestTooLargeError

_SECONDS_FOR_HEALTH = 2.0
# After the last line, for the response's end.
_SECONDS_TO_END = 0.25
# Longest line. With log-probabilities of a 100,000-token prompt, 20 each, it is about 100 MiB.
_MAX_LINE_BYTES = 1 << 30


async def answer_lines(
    replica: str, client: httpx.AsyncClient, body: bytes, headers: Mapping[str, str], on_connected: Callable[[], object]
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """Yields None when the replica has accepted the request, then its lines up to the last, which has ``finished`` set.

    Args:
        on_connected: called when there is a connection, before the request is sent over it.

    Raises:
        Exception: the replica refuses the request, as any would.
        RefusedError: it does not accept it now, cannot be reached, or its pins leave no room to go on.
        LostError: there is no last line.
    """

    async def content() -> AsyncGenerator[bytes, None]:  # which is read when there is a connection
        on_connected()
        yield body

    headers = {**headers, "Content-Length": str(len(body))}  # or it would be sent in chunks
    try:
        async with client.stream("POST", "/generate", content=content(), headers=headers) as response:
            if response.status_code != HTTPStatus.OK:
                await response.aread()
                raise _refusal(replica, response)
            yield None
            async with aclosing(_whole_lines(replica, response)) as lines:
                async for line in lines:
                    piece = _parsed(replica, line)
                    if "error" in piece:
                        raise _failure(replica, piece)
                    try:
                        yield piece
                    finally:  # the reader closes this after the last line
                        if piece["finished"]:
                            await _read_to_end(lines)
                    if piece["finished"]:
                        return  # aborted by the replica, if it was not the end
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise RefusedError(None) from error
    except (httpx.HTTPError, RuntimeError) as error:  # RuntimeError: the client was closed meanwhile
        raise LostError(f"{replica}: {error!r}", died=None) from error
    raise LostError(f"{replica}: it broke off", died=None)


async def has_died(client: httpx.AsyncClient, error: LostError) -> bool:
    """Whether the engine of a replica that lost a request crashed. A replica that broke off is asked.

    Asked after the answer has ended: what calls requests away from a dead replica must not interrupt the question.
    """
    if error.died is not None:
        return error.died
    try:
        response = await client.get("/health", timeout=_SECONDS_FOR_HEALTH)
    except (httpx.HTTPError, RuntimeError):  # RuntimeError: the client is closed
        return True
    return response.status_code != HTTPStatus.OK


def _parsed(replica: str, line: bytes) -> dict[str, Any]:
    """A line as JSON: the next piece of the answer, or an error.

    Raises:
        LostError: it is neither, so the rest means nothing.
    """
    try:
        piece = json.loads(line)
    except ValueError:
        piece = None
    if _is_error(piece):
        return piece
    if isinstance(piece, dict) and "error" not in piece and isinstance(piece.get("finished"), bool):
        return piece
    raise LostError(f"{replica}: it sent a line that is not a piece of an answer: {line[:100]!r}")


def _is_error(sent: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(sent, dict) and isinstance(sent.get("error"), str) and isinstance(sent.get("kind"), str)


async def _read_to_end(lines: AsyncIterator[bytes]) -> None:
    """Read what is left: only a connection whose response was read to its end can serve the next request."""
    with suppress(TimeoutError, httpx.HTTPError, RuntimeError, LostError):
        async with asyncio.timeout(_SECONDS_TO_END):
            async for _ in lines:
                pass


def _failure(replica: str, line: Mapping[str, Any]) -> Exception:
    """Why there is no further line."""
    if line["kind"] == NoBlocksLeftError.__name__:  # each replica has pins of its own
        return RefusedError(NoBlocksLeftError(line["error"]))
    return error_of(line) or LostError(f"{replica}: {line['error']}", died=has_crashed(line))


def _refusal(replica: str, response: httpx.Response) -> Exception:
    """Why a request was not accepted."""
    try:
        answer = response.json()
    except ValueError:
        answer = None
    if not _is_error(answer):
        return LostError(f"{replica}: {response.status_code} {response.text:.300}")
    if response.status_code == HTTPStatus.MISDIRECTED_REQUEST:  # sent to a process that has ended
        return RefusedError(None)
    kind, message, retry_after = answer["kind"], answer["error"], answer.get("retry_after")
    if kind == QueueFullError.__name__ and type(retry_after) is int and retry_after >= 0:
        return RefusedError(QueueFullError(message, retry_after))
    if kind == DrainingError.__name__:
        return RefusedError(None)
    if kind == RequestTooLargeError.__name__:  # a larger replica may accept it
        return RefusedError(RequestTooLargeError(message))
    if response.status_code == HTTPStatus.BAD_REQUEST:
        return refusal_of(answer)
    return LostError(f"{replica}: {response.status_code} {message}")


async def _whole_lines(replica: str, response: httpx.Response) -> AsyncGenerator[bytes, None]:
    """The complete lines, without empty ones: what follows the last line end was cut off.

    Raises:
        LostError: one is longer than any answer's.
    """
    begun = bytearray()  # a long line comes in many chunks
    chunks: AsyncIterator[bytes] = response.aiter_bytes()
    async for chunk in chunks:
        *ends, rest = chunk.split(b"\n")
        for end in ends:
            line = bytes(begun) + end if begun else end
            begun.clear()
            if line:
                yield line
        begun += rest
        if len(begun) > _MAX_LINE_BYTES:
            raise LostError(f"{replica}: it sent a line of more than {_MAX_LINE_BYTES} bytes")
