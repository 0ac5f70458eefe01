"""An id for every request, in headers of its answer and in the access log: one line of JSON per request."""

from __future__ import annotations

import json
import logging
import re
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_log = logging.getLogger(__name__)

_HEADER = "X-Request-Id"
# Headers of an answer that hold the request's id; Anthropic's clients read the second.
ANSWER_HEADERS = (_HEADER, "Request-Id")
# What a log can hold without being misread: no spaces, no quotes, no line ends.
_VALID_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
# Characters of a path that are logged: even a client without a key can send 64 KiB of it.
_MAX_PATH = 512


class RequestLog:
    """ASGI middleware, the outermost: gives each request an id, and logs it when its answer is sent.

    Args:
        write: called with each line; None: nothing is logged.
    """

    def __init__(self, app: ASGIApp, write: Callable[[str], object] | None) -> None:
        self._app = app
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        sent = Headers(scope=scope).get(_HEADER, "")
        # A missing or invalid id is replaced: the client sees in the answer which id the request has here.
        request_id = sent if _VALID_ID.fullmatch(sent) else uuid.uuid4().hex
        state = scope.setdefault("state", {})
        state["request_id"] = request_id
        began, status, is_disconnected = time.monotonic(), None, False

        async def receive_noting_disconnect() -> Message:
            nonlocal is_disconnected
            message = await receive()
            is_disconnected |= message["type"] == "http.disconnect"
            return message

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = None if is_disconnected else message["status"]
                MutableHeaders(scope=message).update(dict.fromkeys(ANSWER_HEADERS, request_id))
            await send(message)

        try:
            await self._app(scope, receive_noting_disconnect, send_with_id)
        finally:
            if self._write is not None:
                fields = {
                    "time": datetime.now(UTC).isoformat(timespec="milliseconds"),
                    "request_id": request_id,
                    "tenant": state["tenant"].label if "tenant" in state else None,
                    "method": scope["method"],
                    "path": logged_path(scope),
                    "status": status,
                    "seconds": round(time.monotonic() - began, 6),
                }
                self._write(json.dumps(fields | _generated(state)))


def logged_path(scope: Scope) -> str:
    """A request's path, cut off where it is longer than any that is served."""
    path: str = scope["path"]
    return path if len(path) <= _MAX_PATH else f"{path[:_MAX_PATH]}..."


def _generated(state: dict[str, Any]) -> dict[str, Any]:
    """What is logged of a request that was answered by the model: `radixkv.server.output.respond.respond` puts it there."""
    answers = state.get("answers")
    if answers is None:
        return {}
    usage, times = answers.usage, answers.times
    waited = None if times is None else _seconds_between(times.arrival_time, times.scheduled_time)
    first_token = None if times is None else _seconds_between(times.arrival_time, times.first_token_time)
    return {
        "id": answers.request_id,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "completion_tokens": usage.completion_tokens,
        "queue_seconds": waited,
        "first_token_seconds": first_token,
        "complete": answers.complete,
    }


def _seconds_between(first: float, second: float | None) -> float | None:
    return None if second is None else round(second - first, 6)


class _AccessLogFile(WatchedFileHandler):
    """A file whose lines are lost while it cannot be written; the server's own log says when that begins and ends."""

    _is_lost = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            super().emit(record)
        except OSError as error:
            # The next line opens the path again: this file may have been removed, and would keep its space.
            stream, self.stream = self.stream, None
            if stream is not None:
                with suppress(OSError):
                    stream.close()
            if not self._is_lost:
                reason = error.strerror or error
                _log.error(
                    "access_log: %s cannot be written (%s); lines are lost until it can", self.baseFilename, reason
                )
            self._is_lost = True
        else:
            if self._is_lost:
                _log.info("access_log: %s is written again", self.baseFilename)
            self._is_lost = False

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - logging's name
        raise  # to our `emit`: the base class's calls this where a line cannot be written


def open_access_log(path: str) -> Callable[[str], object]:
    """A function that writes lines to a file, reopened if it was moved away, or to standard error for "-".

    Raises:
        OSError: the file cannot be written.
    """
    try:
        handler = logging.StreamHandler(sys.stderr) if path == "-" else _AccessLogFile(path)
    except OSError as error:
        raise OSError(f"access_log: cannot write {path}: {error.strerror or error}") from error
    logger = logging.Logger("radixkv.access")  # not a registered one: no other configuration applies to it
    logger.addHandler(handler)
    return logger.info
