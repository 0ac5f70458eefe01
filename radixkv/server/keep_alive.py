"""Signs of life in a stream of events: many clients give up after five minutes of silence."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Send

SECONDS_OF_SILENCE = 15.0
COMMENT = b": keep-alive\n\n"  # which clients ignore, as the standard of server-sent events says


class KeepAlive:
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
