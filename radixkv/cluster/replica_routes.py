"""The private interface of a replica, for an ingress that has the secret. Users never reach it.

::

    POST /generate      a request; a line for each piece of its answers
    GET  /events        which blocks are cached and how much there is to do, as it changes (`radixkv.cluster.records`)
    GET  /description   what runs here (`radixkv.cluster.description`)
    POST /drain         take no new requests; ingresses move what runs elsewhere
    POST /pin           keep a prefix of a tenant's for a time
    POST /clear         forget what is cached of a tenant, or everything
    GET  /snapshot      all that is cached, with texts
    POST /check         verify the bookkeeping of the cache
    PUT  /tenants       what each tenant may have
    GET  /metrics       for Prometheus
    GET  /health        the only one without the secret
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.async_llm import AsyncLLM
from radixkv.cache import InvariantViolation
from radixkv.cluster.announcement import Announcements
from radixkv.cluster.connection import check_secret
from radixkv.cluster.describe import describe
from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.wire import (
    decode_pin,
    decode_request,
    decode_selection,
    decode_shares,
    encode_beams,
    encode_delta,
    encode_error,
    encode_refusal,
)
from radixkv.errors import DrainingError, EngineDeadError, EngineError, QueueFullError
from radixkv.outputs import RequestOutput
from radixkv.server.admin import check_cache
from radixkv.server.cache_insight import snapshot_json
from radixkv.server.metrics import EngineCollector
from radixkv.serving.request_stream import RequestStream

_Endpoint = Callable[[Request], Awaitable[Response]]


def replica_app(llm: AsyncLLM, secret: str, *, drain: Callable[[], object] | None = None) -> ASGIApp:
    """An application for a socket of its own, beside or instead of the public server's.

    Args:
        llm: whose answers it gives.
        secret: that each request must bring as ``Authorization: Bearer SECRET``; it is checked before the body is read.
        drain: called by ``POST /drain``, in addition to `AsyncLLM.start_draining`: to end the process when it has finished.

    Raises:
        ValueError: the secret is shorter than 16 characters, or not ASCII.
    """
    check_secret(secret)
    expected = f"Bearer {secret}".encode()
    announcements = Announcements(llm)
    registry = CollectorRegistry()
    registry.register(EngineCollector(llm))
    # Described once: reading the files of a large model takes seconds.
    described: list[asyncio.Task[ReplicaDescription]] = []

    def private(endpoint: _Endpoint) -> _Endpoint:
        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            if not hmac.compare_digest(request.headers.get("authorization", "").encode(errors="replace"), expected):
                return _refusal(HTTPStatus.UNAUTHORIZED, PermissionError("the replica's secret is missing or wrong"))
            try:
                return await endpoint(request)
            except (DrainingError, EngineDeadError, QueueFullError) as error:
                return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, error)
            except (ValueError, TypeError, KeyError) as error:
                return _refusal(HTTPStatus.BAD_REQUEST, error)

        return checked

    @private
    async def generate(request: Request) -> Response:
        prompt, params, priority, tenant = decode_request(await request.body())
        (stream,) = await llm.submit([prompt], params, priority=priority, tenant=tenant)
        return _Lines(llm, stream)

    @private
    async def events(request: Request) -> Response:
        return _Records(announcements.subscribe(), media_type="application/octet-stream")

    @private
    async def description(request: Request) -> Response:
        if llm.death is not None:
            raise llm.death
        if not described:
            described.append(asyncio.ensure_future(describe(llm)))
        return JSONResponse((await asyncio.shield(described[0])).as_json())

    @private
    async def start_draining(request: Request) -> Response:
        llm.start_draining()
        announcements.announce()
        if drain is not None:
            drain()
        return JSONResponse({"unfinished_requests": llm.num_unfinished})

    @private
    async def pin(request: Request) -> Response:
        tenant, namespace, token_ids, ttl = decode_pin(await request.body())
        kept = await llm.keep(tenant, namespace, token_ids, ttl)
        return JSONResponse({"num_tokens": kept})

    @private
    async def clear(request: Request) -> Response:
        selection = decode_selection(await request.body())
        return JSONResponse((await llm.call(selection.clear))._asdict())

    @private
    async def snapshot(request: Request) -> Response:
        return Response(await snapshot_json(llm), media_type="application/json")

    @private
    async def check(request: Request) -> Response:
        try:
            return JSONResponse((await check_cache(llm)).model_dump())
        except InvariantViolation as violation:
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, violation)

    @private
    async def tenants(request: Request) -> Response:
        await llm.set_tenants(decode_shares(await request.body()))
        return Response()

    @private
    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    async def health(request: Request) -> Response:
        return Response(status_code=HTTPStatus.OK if llm.death is None else HTTPStatus.SERVICE_UNAVAILABLE)

    return Starlette(
        routes=[
            Route("/generate", generate, methods=["POST"]),
            Route("/events", events),
            Route("/description", description),
            Route("/drain", start_draining, methods=["POST"]),
            Route("/pin", pin, methods=["POST"]),
            Route("/clear", clear, methods=["POST"]),
            Route("/snapshot", snapshot),
            Route("/check", check, methods=["POST"]),
            Route("/tenants", tenants, methods=["PUT"]),
            Route("/metrics", metrics),
            Route("/health", health),
        ]
    )


class _Records(StreamingResponse):
    """What is told to one ingress, until it goes away."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


class _Lines(StreamingResponse):
    """A line for each piece; when the ingress goes away, the request is aborted."""

    def __init__(self, llm: AsyncLLM, stream: RequestStream) -> None:
        self._stream = stream
        self._lines = _lines(llm, stream)
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, send)
        finally:
            # A generator that was closed before its first step has not run its own cleanup.
            self._stream.close()


async def _lines(llm: AsyncLLM, stream: RequestStream) -> AsyncGenerator[bytes, None]:
    try:
        has_begun = False
        async for delta in stream:
            if not isinstance(delta, RequestOutput):
                if llm.cut_short:  # the beams alone do not show that only complete ones are among them
                    raise DrainingError("the search was aborted: the replica stops")
                yield encode_beams(delta)
                continue
            # Of a long prompt these are hundreds of kilobytes, and the same each time.
            yield encode_delta(replace(delta, prompt_logprobs=None) if has_begun else delta)
            has_begun = has_begun or any(output.token_ids for output in delta.outputs)
    except EngineError as error:  # the status is sent, so it is a line of its own
        yield encode_error(error)


def _refusal(status: HTTPStatus, error: Exception) -> Response:
    return JSONResponse(encode_refusal(error), status)
