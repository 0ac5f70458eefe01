"""Refuses request bodies that are too long while they arrive, before they are held in memory."""

from __future__ import annotations

from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send


class BodyLimit:
    """ASGI middleware. (FastAPI's own limit answers in plain text, not in OpenAI's error format.)

    Args:
        max_bytes: a request with a longer body is answered 413.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        content_length = Headers(scope=scope).get("content-length", "")
        too_long = content_length.isdigit() and int(content_length) > self._max_bytes
        num_bytes = 0

        async def limited_receive() -> Message:
            nonlocal num_bytes
            if not too_long:
                message = await receive()
                num_bytes += len(message.get("body", b""))
                if num_bytes <= self._max_bytes:
                    return message
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {self._max_bytes} bytes")

        await self._app(scope, limited_receive, send)
