"""The private interface of a replica: `POST /generate`, for an ingress that has the secret. Users never reach it."""

from __future__ import annotations

import hmac
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from http import HTTPStatus

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.async_llm import AsyncLLM
from radixkv.cluster.wire import decode_request, encode_delta, encode_error
from radixkv.engine.request_stream import RequestStream
from radixkv.errors import DrainingError, EngineDeadError, EngineError, QueueFullError
from radixkv.outputs import RequestOutput


def replica_app(llm: AsyncLLM, secret: str) -> ASGIApp:
    """An application for a socket of its own, beside or instead of the public server's.

    Args:
        llm: whose answers it gives.
        secret: that each request must bring as ``Authorization: Bearer SECRET``; it is checked before the body is read.

    Raises:
        ValueError: the secret is shorter than 16 characters, or not ASCII.
    """
    if len(secret) < 16 or not secret.isascii():
        raise ValueError("secret: expected at least 16 ASCII characters")
    expected = f"Bearer {secret}".encode()

    async def generate(request: Request) -> Response:
        if not hmac.compare_digest(request.headers.get("authorization", "").encode(errors="replace"), expected):
            return _refusal(HTTPStatus.UNAUTHORIZED, PermissionError("the replica's secret is missing or wrong"))
        try:
            prompt, params, priority, tenant = decode_request(await request.body())
            (stream,) = await llm.submit([prompt], params, priority=priority, tenant=tenant)
        except (DrainingError, EngineDeadError, QueueFullError) as error:
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, error)
        except (ValueError, TypeError, KeyError) as error:
            return _refusal(HTTPStatus.BAD_REQUEST, error)
        return _Lines(stream)

    async def health(request: Request) -> Response:
        return Response(status_code=HTTPStatus.OK if llm.death is None else HTTPStatus.SERVICE_UNAVAILABLE)

    return Starlette(routes=[Route("/generate", generate, methods=["POST"]), Route("/health", health)])


class _Lines(StreamingResponse):
    """A line for each piece; when the ingress goes away, the request is aborted."""

    def __init__(self, stream: RequestStream) -> None:
        self._stream = stream
        self._lines = _lines(stream)
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, send)
        finally:
            # A generator that was closed before its first step has not run its own cleanup.
            self._stream.close()


async def _lines(stream: RequestStream) -> AsyncGenerator[bytes, None]:
    try:
        has_begun = False
        async for delta in stream:
            assert isinstance(delta, RequestOutput)
            # Of a long prompt these are hundreds of kilobytes, and the same each time.
            yield encode_delta(replace(delta, prompt_logprobs=None) if has_begun else delta)
            has_begun = has_begun or any(output.token_ids for output in delta.outputs)
    except EngineError as error:  # the status is sent, so it is a line of its own
        yield encode_error(error)


def _refusal(status: HTTPStatus, error: Exception) -> Response:
    return JSONResponse({"error": str(error)}, status)
