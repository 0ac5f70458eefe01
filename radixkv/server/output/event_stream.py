"""Answers as server-sent events: how these are written, and sent for as long as the client listens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from fastapi.responses import StreamingResponse
from pydantic import BaseModel
from starlette.types import Message, Receive, Scope, Send

from radixkv.server.errors import as_api_error
from radixkv.server.output.encoded import encode_response

# Many clients give up after five minutes of silence.
_SECONDS_OF_SILENCE = 15.0
COMMENT = b": keep-alive\n\n"  # which clients ignore, as the standard of server-sent events says


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
        sign_of_life: an event or comment that is sent after each ``seconds_of_silence``.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        sign_of_life: bytes,
        seconds_of_silence: float = _SECONDS_OF_SILENCE,
    ) -> None:
        self._events = events
        self._close = close
        self._sign_of_life = sign_of_life
        self._seconds_of_silence = seconds_of_silence
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def stream_response(self, send: Send) -> None:
        stream = _KeepAlive(send, self._sign_of_life, self._seconds_of_silence)
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
            self._close()


class _KeepAlive:
    """Passes on a streamed response, and sends a sign of life whenever nothing was sent for some time.

    Args:
        send: of the response.
        sign: a whole event or comment.
        seconds: of silence before each sign.
    """

    def __init__(self, send: Send, sign: bytes, seconds: float) -> None:
        self._send = send
        self._sign: Message = {"type": "http.response.body", "body": sign, "more_body": True}
        self._seconds = seconds
        self._begun = asyncio.Event()
        self._last = 0.0

    async def send(self, message: Message) -> None:
        """Pass on a part of the response."""
        await self._send(message)
        self._last = asyncio.get_running_loop().time()
        self._begun.set()

    async def run(self) -> None:
        """Send signs of life; to be cancelled before the response ends."""
        await self._begun.wait()
        while True:
            silent_for = asyncio.get_running_loop().time() - self._last
            if silent_for >= self._seconds:
                await self.send(self._sign)
            else:
                await asyncio.sleep(self._seconds - silent_for)
