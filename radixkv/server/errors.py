"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``, with the matching status."""

from __future__ import annotations

import logging
import reprlib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException

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
from radixkv.option_words import hint, nearest
from radixkv.server.not_supported import is_supported

# Those that any endpoint may answer with.
ERROR_STATUSES = (400, 401, 403, 404, 408, 413, 429, 500, 503, 504)

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
        # The message may quote half of a surrogate pair, which JSON can represent and UTF-8 cannot.
        encodable = message.encode(errors="replace").decode()
        self.body = ErrorBody(error=ErrorDetail(message=encodable, type=error_type, param=param, code=code))

    def response(self) -> JSONResponse:
        return JSONResponse(self.body.model_dump(), self.status, self.headers)


def as_api_error(error: Exception) -> ApiError:
    """The response to an error that ended a request; an unexpected error is logged and becomes a 500."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, QueueFullError):
        headers = {"Retry-After": f"{error.retry_after}"}
        return ApiError(HTTPStatus.TOO_MANY_REQUESTS, str(error), code="rate_limit_exceeded", headers=headers)
    if isinstance(error, RequestTimeoutError):
        # Clients retry a 504 by themselves: what took too long would take as long again, and nobody waits for it.
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
    """Turn every error that leaves a route into OpenAI's format.

    Args:
        paths: that there are; they are suggested for a path that does not exist but resembles one.
    """

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status, detail = HTTPStatus(error.status_code), str(error.detail)
        path = request.url.path[:200]
        if status == HTTPStatus.NOT_FOUND:
            near = nearest(path, paths, likeness=_LIKE_A_PATH)
            advice = "/openapi.json describes what there is" if near in (None, path) else f"did you mean {near}?"
            detail = f"there is no {request.method} {path}; {advice}"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            # A path that only matches a route with a variable part may be a misspelling of another path.
            route = request.scope.get("route")
            known = route.path_format if isinstance(route, APIRoute) else path
            detail = f"{known}: expected {(error.headers or {}).get('Allow', 'another method')}, got {request.method}"
            if known != path:
                detail = f"there is no {request.method} {path}; {detail}"
        elif status == HTTPStatus.BAD_REQUEST and error.__cause__ is not None:
            detail = _unreadable(error.__cause__) or detail
        return ApiError(status, detail, headers=error.headers).response()

    async def on_invalid_request(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid_request(error.errors(), error.body, _fields_of(request)).response()

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_error)


# Least likeness to the right path: paths without /v1, with it twice, or with a letter too few reach it; another API's do not.
_LIKE_A_PATH = 0.8
# Least likeness to the right field: a misspelt one has it; stop and top_p are less alike.
_LIKE_A_FIELD = 0.7
# A longer field has no name that is nearly right.
_LONGEST_NAME = 64


def _unreadable(cause: BaseException) -> str | None:
    """Why a body is no JSON that can be read; None: not known. (Where it is malformed, pydantic's error says so.)"""
    if isinstance(cause, UnicodeDecodeError):
        return f"body: expected JSON in UTF-8, got byte 0x{cause.object[cause.start]:02x} at {cause.start}"
    if isinstance(cause, ValueError):  # Python's own limit
        return f"body: expected whole numbers of at most {sys.get_int_max_str_digits():,} digits"
    return None


def _fields_of(request: Request) -> Collection[str]:
    """The supported fields that the body of a request may have; none if it takes no object."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return ()
    body = route.body_field.field_info.annotation
    if not (isinstance(body, type) and issubclass(body, BaseModel)):
        return ()
    return [name for name, field in body.model_fields.items() if is_supported(field)]


# Quotes values in error messages: as much as helps, in a time that does not grow with their size.
_QUOTED = reprlib.Repr()
_QUOTED.maxlevel = 2
_QUOTED.maxstring = _QUOTED.maxother = 60

_PYDANTIC_OPENING = "Input should be "
# How many errors are looked at, and how many are reported.
_MAX_ERRORS, _MAX_SAID = 32, 3


def _invalid_request(errors: Any, body: Any, fields: Collection[str]) -> ApiError:
    """A 400 with the first three validation errors: a union reports one per member.

    Args:
        errors: pydantic's.
        body: of the request.
        fields: that the body may have.
    """
    located = []
    for error in errors[:_MAX_ERRORS]:
        if error["type"] == "json_invalid":
            message = f"body: no JSON from character {error['loc'][1]} on: {error['ctx']['error']}"
            return ApiError(HTTPStatus.BAD_REQUEST, message)
        # The path also holds members of unions, by names that clients do not know.
        path = error["loc"][1:]
        located.append((_path_in(body, path, error["type"] == "missing") if error["loc"][0] == "body" else path, error))
    said = [each for each in located if not _is_of_another_member(*each, located)][:_MAX_SAID]
    param = next((part for path, _ in said for part in path if isinstance(part, str)), None)
    return ApiError(HTTPStatus.BAD_REQUEST, "; ".join(_in_words(*each, fields) for each in said), param=param)


_Path = tuple[int | str, ...]


def _path_in(body: Any, path: _Path, is_missing: bool) -> _Path:
    """The parts of a path that are names and positions in the body, down to what is wrong, or to what is missing."""
    end = path[-1:] if is_missing else ()
    for length in range(len(path) - len(end), 0, -1):
        found = _inner_path(body, path[:length])
        if found is not None:
            return (*found, *end)
    return end


def _inner_path(value: Any, path: _Path) -> _Path | None:
    """The last part of a path, with the parts before it that lead there; None: it is not in the value."""
    if not path:
        return ()
    first, *rest = path
    if isinstance(value, list):
        is_inside = isinstance(first, int) and first < len(value)
    else:
        is_inside = isinstance(value, dict) and first in value
    if is_inside:
        found = _inner_path(value[first], tuple(rest))
        if found is not None:
            return (first, *found)
    return _inner_path(value, tuple(rest)) if rest else None


def _is_of_another_member(path: _Path, error: Any, all_errors: Sequence[tuple[_Path, Any]]) -> bool:
    """Whether an error only says that a value is not of one union member's type, while another member says what is wrong."""
    return error["type"].endswith("_type") and any(
        other[: len(path)] == path and (len(other) > len(path) or not found["type"].endswith("_type"))
        for other, found in all_errors
    )


def _in_words(path: _Path, error: Any, fields: Collection[str]) -> str:
    """One of pydantic's errors."""
    location, context = ".".join(map(str, path)) or "body", error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            is_name = len(path) == 1 and len(location) <= _LONGEST_NAME
            return f"{location}: unknown or not supported" + (hint(location, fields, _LIKE_A_FIELD) if is_name else "")
        case "model_attributes_type" if not path:
            return "body: expected a JSON object, sent with content-type: application/json"
        case "missing":
            return f"{location}: required"
        case "union_tag_not_found":
            return f"{location}.type: required"
        case "union_tag_invalid":
            return f"{location}.type: expected one of {context['expected_tags']}, got {_QUOTED.repr(context['tag'])}"
        case "too_long" | "too_short" | "string_too_long" | "string_too_short" as kind:
            unit = "characters" if kind.startswith("string") else "entries"
            bound = f"at most {context['max_length']}" if kind.endswith("long") else f"at least {context['min_length']}"
            return f"{location}: expected {bound} {unit}, got {len(error['input'])}"
    if error["msg"].startswith(_PYDANTIC_OPENING):
        expected = error["msg"].removeprefix(_PYDANTIC_OPENING)
        return f"{location}: expected {expected}, got {_QUOTED.repr(error['input'])}"
    return f"{location}: {error['msg']}"
