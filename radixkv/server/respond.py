"""Writes the response to one HTTP request, in full or as server-sent events, while its prompts run in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from radixkv.outputs import RequestMetrics
from radixkv.server.encoded import encode
from radixkv.server.errors import ApiError, as_api_error
from radixkv.server.keep_alive import COMMENT, SECONDS_OF_SILENCE, KeepAlive
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
        super().__init__(encode(content))


class EventStream(StreamingResponse):
    """Server-sent events; when the client disconnects, the iteration that produces them is closed.

    Args:
        sign_of_life: what is sent after each ``seconds_of_silence``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        answers: Answers,
        sign_of_life: bytes,
        seconds_of_silence: float = SECONDS_OF_SILENCE,
    ) -> None:
        self._events = events
        self._answers = answers
        self._sign_of_life = sign_of_life
        self._seconds_of_silence = seconds_of_silence
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        stream = KeepAlive(send, self._sign_of_life, self._seconds_of_silence)
        signs = asyncio.ensure_future(stream.run())
        try:
            await super().stream_response(stream.send)
        finally:
            signs.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            # A generator that was closed before its first step has not run its own cleanup.
            self._answers.close()


async def _server_sent_events(chunks: AsyncIterator[BaseModel]) -> AsyncGenerator[bytes, None]:
    """Chunks as server-sent events in OpenAI's format. The status is sent first, so a failure is an event of its own."""
    try:
        async for chunk in chunks:
            yield b"data: %b\n\n" % encode(chunk)
    except Exception as error:
        yield b"data: %b\n\n" % encode(as_api_error(error).body)
    yield b"data: [DONE]\n\n"


async def respond(
    request: Request,
    answers: _A,
    writer: ResponseWriter[_A],
    stream: bool,
    as_events: Callable[[AsyncIterator[BaseModel]], AsyncGenerator[bytes, None]] = _server_sent_events,
    sign_of_life: bytes = COMMENT,
) -> Response:
    """The response to a request whose prompts were submitted; when it ends, all of them have left the engine.

    Args:
        as_events: writes the chunks of a stream as server-sent events.
        sign_of_life: what a stream sends while there is no chunk, as long as the prompt is computed, for example.

    Raises:
        Exception: with ``stream=False``, the error that ended the generation early.
    """
    request.state.generation = answers
    if stream:
        return EventStream(as_events(writer.chunks(answers)), answers, sign_of_life)
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
