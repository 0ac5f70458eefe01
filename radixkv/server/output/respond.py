"""The response to one HTTP request, in full or as events, while its prompts run in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response
from pydantic import BaseModel

from radixkv.outputs import RequestMetrics
from radixkv.server.errors import ApiError
from radixkv.server.output.encoding import encode_response
from radixkv.server.output.event_stream import KEEP_ALIVE_COMMENT, EventStream, events_until_done
from radixkv.server.protocol import Usage

_T = TypeVar("_T")


class Answers(Protocol):
    """What was submitted for one HTTP request, and what the access log says about it."""

    @property
    def request_id(self) -> str: ...

    @property
    def usage(self) -> Usage: ...

    @property
    def times(self) -> RequestMetrics | None: ...

    @property
    def complete(self) -> bool: ...

    def close(self) -> None:
        """Abort what is unfinished."""


_A = TypeVar("_A", bound=Answers, contravariant=True)


class ResponseWriter(Protocol[_A]):
    """Writes an endpoint's responses: in full, or in chunks."""

    async def full_response(self, answers: _A, /) -> BaseModel: ...

    def chunks(self, answers: _A, /) -> AsyncIterator[BaseModel]: ...


class JsonResponse(Response):
    """A pydantic model as JSON, serialised once. (FastAPI validates and copies a model that a route returns.)"""

    media_type = "application/json"

    def __init__(self, content: BaseModel) -> None:
        super().__init__(encode_response(content))


async def respond(
    request: Request,
    answers: _A,
    writer: ResponseWriter[_A],
    stream: bool,
    as_events: Callable[[AsyncIterator[BaseModel]], AsyncGenerator[bytes, None]] = events_until_done,
    keep_alive: bytes = KEEP_ALIVE_COMMENT,
) -> Response:
    """The response to a request whose prompts were submitted; when it ends, all of them have left the engine.

    Args:
        as_events: writes the chunks of a stream as server-sent events.
        keep_alive: what a stream sends while there is no chunk, as long as the prompt is computed, for example.

    Raises:
        Exception: with ``stream=False``, the error that ended the generation early.
    """
    request.state.answers = answers
    if stream:
        return EventStream(as_events(writer.chunks(answers)), answers.close, keep_alive)
    try:
        return JsonResponse(await cancel_on_disconnect(request, writer.full_response(answers)))
    finally:
        answers.close()


async def cancel_on_disconnect(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client disconnects first.

    Raises:
        ApiError: the client has disconnected, so the response is not read.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            await asyncio.wait({task})  # what it has taken is given back
            raise ApiError(HTTPStatus.BAD_REQUEST, "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        listener.cancel()


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
