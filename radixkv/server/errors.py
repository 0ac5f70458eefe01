"""Errors, in OpenAI's format, ``{"error": {"message", "type", "param", "code"}}``, or in Anthropic's."""

from __future__ import annotations

import logging
import sys
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.types import Scope

from radixkv.errors import (
    DrainingError,
    EngineDeadError,
    EngineError,
    MissingPackageError,
    NoBlocksLeftError,
    PromptTooLongError,
    QueueFullError,
    ReplicasLostError,
    RequestCrashesError,
    RequestTimeoutError,
)
from radixkv.option_words import nearest
from radixkv.server.messages.errors import as_messages_error, uses_anthropic_format
from radixkv.server.validation_errors import in_words

# Those that any endpoint may answer with.
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)
# Least likeness to the right path: paths without /v1, with it twice, or with a letter too few reach it; another API's do not.
_LIKE_A_PATH = 0.8

_log = logging.getLogger(__name__)


class ErrorDetail(BaseModel):
    """What went wrong, and with which argument."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every response that is not a success."""

    error: ErrorDetail


class ApiError(Exception):
    """A response with an error status."""

    def __init__(
        self,
        status: HTTPStatus,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        error_type = "server_error" if status >= 500 else "invalid_request_error"
        error_type = "rate_limit_error" if status == HTTPStatus.TOO_MANY_REQUESTS else error_type
        # The message may quote a lone surrogate, which JSON can represent and UTF-8 cannot.
        encodable = message.encode(errors="replace").decode()
        self.body = ErrorBody(error=ErrorDetail(message=encodable, type=error_type, param=param, code=code))

    def response(self, scope: Scope) -> JSONResponse:
        """The response to a request, in the form that its client reads."""
        error = self.body.error
        body = (
            as_messages_error(self.status, error.message, error.param, error.code)
            if uses_anthropic_format(scope)
            else self.body
        )
        return JSONResponse(body.model_dump(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """The response to an error that ended a request; an unexpected error is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": f"{error.retry_after}"}
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="rate_limit_exceeded", headers=headers)
    if isinstance(error, RequestTimeoutError):
        # Clients retry a 504 by themselves: what took too long would take as long again.
        headers = {} if error.in_queue else {"X-Should-Retry": "false"}
        return ApiError(HTTPStatus.GATEWAY_TIMEOUT, str(error), code="timeout", headers=headers)
    if isinstance(error, RequestCrashesError):  # not a 500, which clients send again
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), code="request_crashes_engine")
    if isinstance(error, DrainingError | NoBlocksLeftError | ReplicasLostError):
        return ApiError(HTTPStatus.SERVICE_UNAVAILABLE, str(error), code="unavailable")
    if not isinstance(error, EngineDeadError):  # the engine logs this one itself, once
        _log.error("a request failed", exc_info=error)
    return ApiError(HTTPStatus.INTERNAL_SERVER_ERROR, "the server failed to answer this request", code="internal_error")


@contextmanager
def client_errors(request_field_names: Mapping[str, str] = MappingProxyType({})) -> Iterator[None]:
    """While a request is validated: turn `ValueError` and `TypeError` into a 400 that names the field.

    `MissingPackageError`, too: the request asks for what is not installed.

    Args:
        request_field_names: library argument name to request field name, where the two differ.
    """
    try:
        yield
    except (ValueError, TypeError, MissingPackageError) as error:
        raise client_error(error, request_field_names) from error


def client_error(error: Exception, request_field_names: Mapping[str, str]) -> ApiError:
    """A 400 that names the field of the request that an error is about; see `client_errors`."""
    # The checks of prompts and parameters begin with the argument's name.
    message, param = str(error), None
    name, colon, rest = message.partition(":")
    if colon and name.isidentifier():
        param = request_field_names.get(name, name)
        message = f"{param}:{rest}"
    code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
    return ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code)


def add_error_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Turn every error that leaves a route into a response, see `ApiError.response`.

    Args:
        paths: that there are; they are suggested for a path that does not exist but resembles one.
    """

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response(request.scope)

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status, detail = HTTPStatus(error.status_code), str(error.detail)
        path = request.url.path[:200]
        if status == HTTPStatus.NOT_FOUND:
            near = nearest(path, paths, likeness=_LIKE_A_PATH)
            advice = "/openapi.json describes what there is" if near in (None, path) else f"did you mean {near}?"
            detail = f"there is no {request.method} {path}; {advice}"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            route = request.scope.get("route")
            known = route.path_format if isinstance(route, APIRoute) else path
            detail = f"{known}: expected {(error.headers or {}).get('Allow', 'another method')}, got {request.method}"
            if known != path:
                # It only matches a route with a variable part, and may be another path, which there is not.
                status = HTTPStatus.NOT_FOUND
                detail = f"there is no {request.method} {path}; {detail}"
        elif status == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:
            detail = _unreadable(error.__cause__) or detail
        return ApiError(status, detail, headers=error.headers).response(request.scope)

    async def on_invalid_request(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        message, param = in_words(error, request)
        return ApiError(HTTPStatus.BAD_REQUEST, message, param=param).response(request.scope)

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_error)


def _unreadable(cause: BaseException) -> str | None:
    """Why a body is no JSON that can be read; None: not known. (Where it is malformed, pydantic's error says so.)"""
    if isinstance(cause, UnicodeDecodeError):
        return f"body: expected JSON in UTF-8, got byte 0x{cause.object[cause.start]:02x} at {cause.start}"
    if isinstance(cause, ValueError):  # Python's own limit
        return f"body: expected whole numbers of at most {sys.get_int_max_str_digits():,} digits"
    return None
