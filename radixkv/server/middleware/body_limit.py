"""Refuses request bodies that would cost too much: in memory while they arrive, or in time when they are read as JSON."""

from __future__ import annotations

import re
from collections import Counter
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

# Strings, lists and objects in one body. So many block the event loop for 0.2 s; the millions that fit into 8 MB, for 4.5 s.
_MAX_PARTS = 100_000
# Values of any kind: numbers are parsed ten times as fast, but validation looks at each of them again.
_MAX_VALUES = 1_000_000
# Nesting depth. Python's parser reads several hundred levels, on which later steps fail.
_MAX_DEPTH = 128
# Length of all of a tenant's bodies at a time, as a multiple of the longest one allowed.
_MAX_BODIES = 16
# A string, closed or not, or the beginning or the end of a list or an object.
_PART = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{\]}]', re.DOTALL)


class BodyLimit:
    """ASGI middleware, inside of authentication. (FastAPI's own limit answers in plain text, not in OpenAI's error format.)

    The bodies of one tenant's unfinished requests may have sixteen times the length allowed for one. Further ones are
    answered 429, so that no client fills the memory with bodies that it never ends.

    Args:
        max_bytes: a request with a longer body is answered 413.
    """

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        # By tenant: the bytes of its requests' bodies that are in memory.
        self._held: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        tenant = scope.get("state", {}).get("tenant")
        body = _Body(receive, Headers(scope=scope), self._max_bytes, self._held, "" if tenant is None else tenant.name)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.release()


class _Body:
    """One request's body, which is passed on when it is complete."""

    def __init__(self, receive: Receive, headers: Headers, max_bytes: int, held: Counter[str], tenant: str) -> None:
        self._receive = receive
        self._content_length = headers.get("content-length", "")
        self._max_bytes = max_bytes
        self._held = held
        self._tenant = tenant
        self._num_bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        """The whole body, and afterwards what follows it."""
        if self._complete:
            return await self._receive()
        if self._content_length.isdigit():
            self._check_length(int(self._content_length))
        chunks: list[bytes] = []
        more = True
        while more:
            message = await self._receive()
            if message["type"] != "http.request":
                return message
            chunk = message.get("body", b"")
            chunks.append(chunk)
            self._hold(len(chunk))
            more = message.get("more_body", False)
        body = b"".join(chunks)
        _refuse_costly(body)
        self._complete = True
        return {"type": "http.request", "body": body, "more_body": False}

    def release(self) -> None:
        """Count the body no more: the request has ended."""
        self._held[self._tenant] -= self._num_bytes
        if not self._held[self._tenant]:
            del self._held[self._tenant]
        self._num_bytes = 0

    def _hold(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._held[self._tenant] += num_bytes
        self._check_length(self._num_bytes)
        if self._held[self._tenant] > _MAX_BODIES * self._max_bytes:
            raise HTTPException(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"the bodies of this key's unfinished requests are longer than {_MAX_BODIES * self._max_bytes} bytes",
                headers={"Retry-After": "1"},
            )

    def _check_length(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"the body is longer than {self._max_bytes} bytes")


def _refuse_costly(body: bytes) -> None:
    """Refuse JSON that takes long to read or is deeply nested, in a time that hardly grows with its size.

    Raises:
        HTTPException: 400.
    """
    # These counts include characters within strings, and so are never too low.
    num_begun = body.count(b"[") + body.count(b"{")
    num_commas = body.count(b",")
    if num_begun <= _MAX_DEPTH and body.count(b'"') // 2 + num_begun <= _MAX_PARTS and num_commas < _MAX_VALUES:
        return
    # UTF-16, with two bytes a character, would hide quotes from the search below.
    if b"\0" in body:
        raise HTTPException(HTTPStatus.BAD_REQUEST, "body: expected JSON in UTF-8")
    num_parts = depth = 0
    for match in _PART.finditer(body):
        first = body[match.start()]
        if first in b"]}":
            depth -= 1
            continue
        num_parts += 1
        if first == ord('"'):
            num_commas -= body.count(b",", match.start(), match.end())
        depth += first in b"[{"
        if num_parts > _MAX_PARTS:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, f"body: expected at most {_MAX_PARTS:,} strings, lists and objects in it"
            )
        if depth > _MAX_DEPTH:
            raise HTTPException(
                HTTPStatus.BAD_REQUEST, f"body: expected at most {_MAX_DEPTH} lists and objects within each other"
            )
    if num_commas >= _MAX_VALUES:
        raise HTTPException(HTTPStatus.BAD_REQUEST, f"body: expected at most {_MAX_VALUES:,} values in it")
