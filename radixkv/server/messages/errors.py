"""Errors in Anthropic's form: ``{"type": "error", "error": {"type", "message"}}``."""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal

from pydantic import BaseModel
from starlette.datastructures import Headers
from starlette.types import Scope

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
    """Details by which Anthropic's clients send this request, and later ones, without a ``thread``."""

    error_code: Literal["thread_unsupported_request"] = "thread_unsupported_request"
    unsupported: list[str] = ["thread"]


class RefusedThread(MessagesErrorDetail):
    """The Messages API holds no conversations, so it cannot continue one."""

    details: ThreadRefusal = ThreadRefusal()


class MessagesError(BaseModel):
    """The body of a response that is not a success, and the event that ends a stream that failed."""

    type: Literal["error"] = "error"
    error: RefusedThread | MessagesErrorDetail


def as_messages_error(status: int, message: str, param: str | None = None, code: str | None = None) -> MessagesError:
    """An error by the status that it would have as a response.

    Args:
        param: the field of the request that it is about, where that is known.
        code: what OpenAI's clients know it by.
    """
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    detail = RefusedThread if param == "thread" else MessagesErrorDetail
    # Anthropic's errors have no code: by these words clients know that they are to shorten the conversation, and by the
    # "N tokens > M maximum" that follows by how much.
    opening = "prompt is too long: " if code == "context_length_exceeded" else ""
    return MessagesError(error=detail(type=kind, message=f"{opening}{message}"))


def is_anthropic_client(headers: Headers) -> bool:
    """Whether Anthropic's client sent a request; OpenAI's, without this header, requests models by the same path."""
    return "anthropic-version" in headers


def uses_anthropic_format(scope: Scope) -> bool:
    """Whether responses have Anthropic's format: in the Messages API, and in /v1/models for Anthropic's client."""
    path = f"{scope['path']}/"
    return path.startswith("/v1/messages/") or (
        path.startswith("/v1/models/") and is_anthropic_client(Headers(scope=scope))
    )
