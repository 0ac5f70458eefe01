"""Errors in Anthropic's form: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from radixkv.server.errors import ErrorBody, as_api_error

_TYPES = MappingProxyType(
    {
        401: "authentication_error",
        403: "permission_error",
        404: "not_found_error",
        408: "timeout_error",
        413: "request_too_large",
        429: "rate_limit_error",
        503: "overloaded_error",
        504: "timeout_error",
    }
)


class MessagesErrorDetail(BaseModel):
    """What went wrong."""

    type: str
    message: str


class ThreadRefusal(BaseModel):
    """Tells Anthropic's clients to send this request and later ones without a ``thread``."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = ["thread"]


class RefusedThread(MessagesErrorDetail):
    """The Messages API holds no conversations, so it cannot continue one."""

    details: ThreadRefusal = ThreadRefusal()


class MessagesError(BaseModel):
    """The body of a response that is not a success, and the event that ends a stream that failed."""

    type: Literal["error"] = "error"
    error: RefusedThread | MessagesErrorDetail


def as_messages_error(status: int, message: str, param: str | None = None) -> MessagesError:
    """An error by the status that it would have as a response.

    Args:
        param: the field of the request that it is about, where that is known.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = RefusedThread if param == "thread" else MessagesErrorDetail
    return MessagesError(error=detail(type=kind, message=message))


class MessagesErrors:
    """ASGI middleware: rewrites errors for Anthropic's clients, wherever in the server they arose."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _has_anthropic_s_form(scope):
            await self._app(scope, receive, send)
            return
        start: Message | None = None
        started = False
        body = b""

        async def rewriting_send(message: Message) -> None:
            nonlocal start, started, body
            if message["type"] == "http.response.start":
                started = True
                if message["status"] >= 400:
                    start = message
                    return
            if start is None:
                await send(message)
                return
            body += message.get("body", b"")
            if not message.get("more_body", False):
                rewritten = _rewritten(start["status"], body)
                headers = MutableHeaders(raw=start["headers"])
                headers["content-length"] = str(len(rewritten))
                headers["content-type"] = "application/json"
                await send(start)
                await send({"type": "http.response.body", "body": rewritten})

        try:
            await self._app(scope, receive, rewriting_send)
        except Exception as error:
            if started:
                raise
            await as_api_error(error).response()(scope, receive, rewriting_send)


def is_anthropic_s_client(headers: Headers) -> bool:
    """Whether Anthropic's client sent a request; OpenAI's, without this header, asks for models at the same address."""
    return "anthropic-version" in headers


def _has_anthropic_s_form(scope: Scope) -> bool:
    """Whether a response has that form: always in the Messages API, and for /v1/models where Anthropic's client asks."""
    path = f"{scope['path']}/"
    return path.startswith("/v1/messages/") or (
        path.startswith("/v1/models/") and is_anthropic_s_client(Headers(scope=scope))
    )


def _rewritten(status: int, body: bytes) -> bytes:
    """An error body in OpenAI's form, or a plain text, written in Anthropic's form."""
    try:
        error = ErrorBody.model_validate_json(body).error
    except ValidationError:
        return as_messages_error(status, body.decode(errors="replace")).model_dump_json().encode()
    # Anthropic's errors have no code: by these words clients know that they are to shorten the conversation, and by the
    # "N tokens > M maximum" that follows by how much.
    opening = "prompt is too long: " if error.code == "context_length_exceeded" else ""
    return as_messages_error(status, f"{opening}{error.message}", error.param).model_dump_json().encode()
