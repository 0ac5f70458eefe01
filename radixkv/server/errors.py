"""Errors in OpenAI's format: ``{"error": {"message", "type", "param", "code"}}``, with the matching status."""

from __future__ import annotations

import logging
import re
import reprlib
from collections.abc import Collection, Iterator, Mapping
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
    NoBlocksLeftError,
    PromptTooLongError,
    QueueFullError,
    ReplicasLostError,
    RequestCrashesError,
    RequestTimeoutError,
    StructuredOutputError,
)
from radixkv.option_words import nearest

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
    if isinstance(error, StructuredOutputError):
        return ApiError(HTTPStatus.BAD_REQUEST, str(error), param="structured_outputs")
    if isinstance(error, RequestTimeoutError):
        return ApiError(HTTPStatus.GATEWAY_TIMEOUT, str(error), code="timeout")
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

    Args:
        request_field_names: library argument name to request field name, where the two differ.
    """
    try:
        yield
    except (ValueError, TypeError) as error:
        # The checks of prompts and parameters begin with the argument's name.
        message, param = str(error), None
        name, colon, rest = message.partition(":")
        if colon and name.isidentifier():
            param = request_field_names.get(name, name)
            message = f"{param}:{rest}"
        code = "context_length_exceeded" if isinstance(error, PromptTooLongError) else None
        raise ApiError(HTTPStatus.BAD_REQUEST, message, param=param, code=code) from error


def add_error_handlers(app: FastAPI, paths: Collection[str]) -> None:
    """Turn every error that leaves a route into OpenAI's format.

    Args:
        paths: that there are; one that is not there may be meant to be one of them.
    """

    async def on_error(request: Request, error: Exception) -> JSONResponse:
        return as_api_error(error).response()

    async def on_http_error(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        status, detail = HTTPStatus(error.status_code), str(error.detail)
        path = request.url.path[:200]
        if status == HTTPStatus.NOT_FOUND:
            near = nearest(path, paths, likeness=_LIKE_A_PATH)
            hint = "/openapi.json describes what there is" if near in (None, path) else f"did you mean {near}?"
            detail = f"there is no {request.method} {path}; {hint}"
        elif status == HTTPStatus.METHOD_NOT_ALLOWED:
            detail = f"{path}: expected {(error.headers or {}).get('Allow', 'another method')}, got {request.method}"
        return ApiError(status, detail, headers=error.headers).response()

    async def on_invalid_request(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return _invalid_request(error.errors(), _fields_of(request)).response()

    app.add_exception_handler(ApiError, on_error)
    app.add_exception_handler(EngineError, on_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(RequestValidationError, on_invalid_request)
    app.add_exception_handler(Exception, on_error)


# A path without /v1, with it twice, or with a letter too few is as much like the right one; one of another API is not.
_LIKE_A_PATH = 0.8
# A longer field has no name that is nearly right.
_LONGEST_NAME = 64


def _fields_of(request: Request) -> Collection[str]:
    """The fields that the body of a request may have; none if it takes no object."""
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or route.body_field is None:
        return ()
    body = route.body_field.field_info.annotation
    return body.model_fields if isinstance(body, type) and issubclass(body, BaseModel) else ()


# Values in error messages: as much as helps, in a time that does not grow with their size.
_QUOTED = reprlib.Repr()
_QUOTED.maxlevel = 2
_QUOTED.maxstring = _QUOTED.maxother = 60

_PYDANTIC_OPENING = "Input should be "
# How pydantic names the member of a union that it tried: str, constrained-str, TextPart, list[TextPart].
_UNION_MEMBER = re.compile(r"str|int|float|bool|constrained-\w+|[A-Z]\w*|[\w-]+\[.*\]")


def _invalid_request(errors: Any, fields: Collection[str]) -> ApiError:
    """A 400 with the first three validation errors: a union reports one per member.

    Args:
        errors: pydantic's.
        fields: that the body may have.
    """
    messages, param = [], None
    for error in errors[:3]:
        path = error["loc"][1:]
        if error["type"] == "json_invalid":
            messages.append(f"body: no JSON from character {path[0]} on: {error['ctx']['error']}")
            continue
        # The members of a union are in the path, too, by names that clients do not know.
        unknown = path[-1:] if error["type"] == "extra_forbidden" else ()  # named by the client, like a member perhaps
        path = [
            *(part for part in path[: len(path) - len(unknown)] if not _UNION_MEMBER.fullmatch(str(part))),
            *unknown,
        ]
        location = ".".join(map(str, path)) or "body"
        param = param or next((part for part in path if isinstance(part, str)), None)
        match error["type"]:
            case "extra_forbidden":
                is_name = len(path) == 1 and len(location) <= _LONGEST_NAME
                near = nearest(location, fields) if is_name else None
                hint = "" if near is None else f"; did you mean {near}?"
                messages.append(f"{location}: unknown or not supported{hint}")
            case "model_attributes_type" if not path:
                messages.append("body: expected a JSON object, sent with content-type: application/json")
            case "missing":
                messages.append(f"{location}: required")
            case _ if error["msg"].startswith(_PYDANTIC_OPENING):
                expected = error["msg"].removeprefix(_PYDANTIC_OPENING)
                messages.append(f"{location}: expected {expected}, got {_QUOTED.repr(error['input'])}")
            case _:
                messages.append(f"{location}: {error['msg']}")
    return ApiError(HTTPStatus.BAD_REQUEST, "; ".join(messages), param=param)
