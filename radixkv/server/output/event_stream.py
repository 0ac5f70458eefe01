"""Answers as server-sent events: how these are written, and sent for as long as the client listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from radixkv.server.errors import as_api_error
from radixkv.server.output.encoding import encode_response

# Many clients give up where nothing comes for five minutes.
_SECONDS_BETWEEN_KEEP_ALIVES = 15.0
KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # which clients ignore, as the standard of server-sent events says


async def events_until_done(chunks: AsyncIterator[BaseModel]) -> AsyncGenerator[bytes, None]:
    """OpenAI's older form, whose end is marked. The status is sent first, so a failure is an event of its own."""
    try:
        async for chunk in chunks:
            yield b"data: %b\n\n" % encode_response(chunk)
    except Exception as error:
        yield b"data: %b\n\n" % encode_response(as_api_error(error).body)
    yield b"data: [DONE]\n\n"


async def named_events(events: AsyncIterator[BaseModel]) -> AsyncGenerator[bytes, None]:
    """Events named by the ``type`` of what they carry, a field of each model. The last one says itself that it is."""
    async for event in events:
        yield named_event(event)


def named_event(event: BaseModel) -> bytes:
    """One of `named_events`."""
    kind: str = event.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode_response(event))


class EventStream(StreamingResponse):
    """A response of events; when the client disconnects, the iteration that produces them is closed.

    Args:
        close: called at the end, whether an event was sent or not.
        keep_alive: an event or comment that is sent whenever nothing was sent for ``keep_alive_seconds``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        keep_alive: bytes,
        keep_alive_seconds: float = _SECONDS_BETWEEN_KEEP_ALIVES,
    ) -> None:
        self._events = events
        self._close = close
        self._keep_alive = keep_alive
        self._keep_alive_seconds = keep_alive_seconds
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        stream = _KeepAlive(send, self._keep_alive, self._keep_alive_seconds)
        keep_alives = asyncio.ensure_future(stream.run())
        try:
            await super().stream_response(stream.send)
        finally:
            keep_alives.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            # A generator that was closed before its first step has not run its own cleanup.
            self._close()


class _KeepAlive:
    """Passes on a streamed response, and sends something itself whenever nothing was sent for some time.

    Args:
        send: of the response.
        content: what is sent then, a whole event or comment.
        seconds: for which nothing was sent.
    """

    def __init__(self, send: Send, content: bytes, seconds: float) -> None:
        self._send = send
        self._keep_alive: Message = {"type": "http.response.body", "body": content, "more_body": True}
        self._seconds = seconds
        self._begun = asyncio.Event()
        self._last = 0.0

    async def send(self, message: Message) -> None:
        """Pass on a part of the response."""
        await self._send(message)
        self._last = asyncio.get_running_loop().time()
        self._begun.set()

    async def run(self) -> None:
        """Send what keeps the connection alive; to be cancelled before the response ends."""
        await self._begun.wait()
        while True:
            idle_for = asyncio.get_running_loop().time() - self._last
            if idle_for >= self._seconds:
                await self.send(self._keep_alive)
            else:
                await asyncio.sleep(self._seconds - idle_for)
