"""The private interface of a replica, for an ingress that has the secret. Users never reach it.

::

    POST /generate      a request; a line for each piece of its answers
    GET  /events        which blocks are cached and how much there is to do, as it changes (`radixkv.cluster.records`)
    GET  /description   what runs here (`radixkv.cluster.description`)
    POST /drain         take no new requests; ingresses move what runs elsewhere
    POST /pin           keep a prefix, of a tenant's or of the administrator's
    GET  /pins          those of the administrator
    DELETE /pins/NAME   release one of them
    POST /explain       why prompts would not be reused
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
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from functools import wraps
from http import HTTPStatus

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.async_llm import AsyncLLM
from radixkv.cache import InvariantViolation, PinQuotaExceeded
from radixkv.cluster.announced_requests import PendingRequest
from radixkv.cluster.announcements import Announcements
from radixkv.cluster.connection import check_secret
from radixkv.cluster.describe import describe
from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.wire import (
    ACCEPTED_HEADER,
    INSTANCE_HEADER,
    decode_pin,
    decode_prompts,
    decode_request,
    decode_selection,
    decode_sender,
    decode_shares,
    encode_beams,
    encode_begun,
    encode_delta,
    encode_error,
    encode_refusal,
    encode_scheduled,
)
from radixkv.errors import DrainingError, EngineDeadError, EngineError, QueueFullError, RequestTooLargeError
from radixkv.outputs import RequestOutput
from radixkv.prompts import Prompt
from radixkv.sampling_params import BeamSearchParams, SamplingParams, prompt_only_params
from radixkv.server.operation.admin import check_cache, snapshot_json
from radixkv.server.operation.metrics import EngineCollector
from radixkv.server.operation.pins import EnginePins
from radixkv.serving.request_stream import RequestStream

_Endpoint = Callable[[Request], Awaitable[Response]]


def replica_app(llm: AsyncLLM, secret: str, *, drain: Callable[[], object] | None = None) -> ASGIApp:
    """An application for a socket of its own, beside or instead of the public server's.

    Args:
        llm: whose answers it gives.
        secret: that each request must bring as ``Authorization: Bearer SECRET``; it is checked before the body is read.
        drain: called by ``POST /drain``, in addition to `AsyncLLM.start_draining`: to end the process when it has finished.

    Raises:
        TypeError, ValueError: the secret is impossible.
    """
    check_secret(secret)
    replica, authorization = _Replica(llm, drain), f"Bearer {secret}".encode()

    def private(path: str, endpoint: _Endpoint, method: str = "GET") -> Route:
        return Route(path, _with_secret(replica.for_this_process(endpoint), authorization), methods=[method])

    return Starlette(
        routes=[
            private("/generate", replica.generate, "POST"),
            private("/events", replica.events),
            Route("/description", _with_secret(replica.description, authorization)),
            private("/drain", replica.start_draining, "POST"),
            private("/pin", replica.pin, "POST"),
            private("/pins", replica.list_pins),
            private("/pins/{name}", replica.release_pin, "DELETE"),
            private("/explain", replica.explain, "POST"),
            private("/clear", replica.clear, "POST"),
            private("/snapshot", replica.snapshot),
            private("/check", replica.check, "POST"),
            private("/tenants", replica.set_tenants, "PUT"),
            private("/metrics", replica.metrics),
            Route("/health", replica.for_this_process(replica.health)),
        ]
    )


def _with_secret(endpoint: _Endpoint, expected: bytes) -> _Endpoint:
    """The endpoint for requests with this header, and with its errors as responses."""

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
        except ClientDisconnect:  # while it sent the body; nobody reads the response
            return _refusal(HTTPStatus.BAD_REQUEST, ConnectionError("the ingress has disconnected"))

    return checked


class _Replica:
    """The endpoints of one replica."""

    def __init__(self, llm: AsyncLLM, drain: Callable[[], object] | None) -> None:
        self._llm = llm
        self._drain = drain
        self._started = time.monotonic()
        self._instance = secrets.token_hex(8)
        self._announcements = Announcements(llm)
        self._pins = EnginePins(llm)
        self._registry = CollectorRegistry()
        self._registry.register(EngineCollector(llm))
        # Made once: reading the files of a large model takes seconds.
        self._description: asyncio.Task[ReplicaDescription] | None = None

    def for_this_process(self, endpoint: _Endpoint) -> _Endpoint:
        """The endpoint, which refuses requests for an earlier process at this address."""

        @wraps(endpoint)
        async def checked(request: Request) -> Response:
            if request.headers.get(INSTANCE_HEADER, self._instance) != self._instance:
                return _refusal(HTTPStatus.MISDIRECTED_REQUEST, LookupError("another process was here before"))
            return await endpoint(request)

        return checked

    async def generate(self, request: Request) -> Response:
        prompt, params, priority, tenant = decode_request(await request.body())
        self._check_room(prompt, params)
        sender = decode_sender(request.headers)
        # Announced at once: the engine takes it only between two steps.
        pending = self._announcements.requests.add(prompt, params, sender)
        try:
            accepted = ACCEPTED_HEADER in request.headers
            (stream,) = await self._llm.submit([prompt], params, priority=priority, tenant=tenant, accepted=accepted)
        except BaseException:
            pending.end()
            raise
        return _Lines(stream, pending)

    def _check_room(self, prompt: Prompt, params: SamplingParams | BeamSearchParams) -> None:
        """Refuse a request whose answer would end sooner here than on others, because this replica's pool is smaller.

        An ingress asks for no more than fits on all replicas: what does not fit here was accepted before this one was up.

        Raises:
            RequestTooLargeError: a replica with a larger pool is to take it.
        """
        if params.max_tokens is None:
            return
        loaded, num_tokens = self._llm.loaded, len(prompt.token_ids) + params.max_tokens
        if min(num_tokens, loaded.original_max_model_len) > loaded.max_model_len:
            raise RequestTooLargeError(
                f"an answer may reach {num_tokens} tokens with its prompt, and there is room for {loaded.max_model_len}"
            )

    async def events(self, request: Request) -> Response:
        records = self._announcements.subscribe(decode_sender(request.headers))
        return _Records(records, media_type="application/octet-stream")

    async def description(self, request: Request) -> Response:
        if self._llm.death is not None:
            raise self._llm.death
        if self._description is None:
            self._description = asyncio.ensure_future(describe(self._llm, self._instance, self._started))
            self._description.add_done_callback(self._forget_failed)
        described = await asyncio.shield(self._description)
        return JSONResponse(described.as_json())

    def _forget_failed(self, description: asyncio.Future[ReplicaDescription]) -> None:
        """Have the next request for it make it again."""
        if description.cancelled() or description.exception() is not None:
            self._description = None

    async def start_draining(self, request: Request) -> Response:
        self._llm.start_draining()
        self._announcements.announce()
        if self._drain is not None:
            self._drain()
        return JSONResponse({"unfinished_requests": self._llm.num_unfinished})

    async def pin(self, request: Request) -> Response:
        tenant, namespace, token_ids, ttl = decode_pin(await request.body())
        if tenant is not None and ttl is not None:
            return JSONResponse({"num_tokens": await self._llm.keep(tenant, namespace, token_ids, ttl)})
        prompt = Prompt(token_ids, namespace=namespace)
        pending = self._announcements.requests.add(prompt, prompt_only_params(), decode_sender(request.headers))
        try:
            made = await self._pins.pin(prompt, ttl)
            pending.prefilled()
        except PinQuotaExceeded as error:
            return JSONResponse({"needed": error.needed, "quota": error.quota}, HTTPStatus.CONFLICT)
        finally:
            pending.end()
        return JSONResponse(None if made is None else made.model_dump())

    async def list_pins(self, request: Request) -> Response:
        return JSONResponse([pin.model_dump() for pin in await self._pins.listed()])

    async def release_pin(self, request: Request) -> Response:
        return JSONResponse(await self._pins.release(request.path_params["name"]))

    async def explain(self, request: Request) -> Response:
        prompts, tenant = decode_prompts(await request.body())
        explained = await self._llm.explain_prompts(prompts, tenant=tenant)
        return JSONResponse([one.as_dict() for one in explained])

    async def clear(self, request: Request) -> Response:
        selection = decode_selection(await request.body())
        return JSONResponse((await self._llm.clear(selection))._asdict())

    async def snapshot(self, request: Request) -> Response:
        return Response(await snapshot_json(self._llm), media_type="application/json")

    async def check(self, request: Request) -> Response:
        try:
            return JSONResponse((await check_cache(self._llm)).model_dump())
        except InvariantViolation as violation:
            return _refusal(HTTPStatus.INTERNAL_SERVER_ERROR, violation)

    async def set_tenants(self, request: Request) -> Response:
        await self._llm.set_tenants(decode_shares(await request.body()))
        return Response()

    async def metrics(self, request: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    async def health(self, request: Request) -> Response:
        return Response(status_code=HTTPStatus.OK if self._llm.death is None else HTTPStatus.SERVICE_UNAVAILABLE)


class _Records(StreamingResponse):
    """The records for one ingress, until it disconnects."""

    body_iterator: AsyncGenerator[bytes, None]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with aclosing(self.body_iterator):
            await super().__call__(scope, receive, send)


class _Lines(StreamingResponse):
    """A line for each piece; when the ingress disconnects, the request is aborted."""

    def __init__(self, stream: RequestStream, pending: PendingRequest) -> None:
        self._stream = stream
        self._pending = pending
        self._lines = _lines(stream, pending)
        super().__init__(self._lines, media_type="application/x-ndjson")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._lines):
                await super().__call__(scope, receive, send)
        finally:
            self._pending.end()
            # A generator that was closed before its first step has not run its own cleanup.
            self._stream.close()


async def _lines(stream: RequestStream, pending: PendingRequest) -> AsyncGenerator[bytes, None]:
    try:
        assert stream.request is not None
        await stream.wait_until_admitted()
        if not stream.begun.is_set():
            yield encode_scheduled()
        if isinstance(stream.request.params, BeamSearchParams):
            await stream.begun.wait()
            if not stream.ended:
                pending.prefilled()
                yield encode_begun()
        has_begun = False
        async for delta in stream:
            if not isinstance(delta, RequestOutput):
                if delta.aborted:
                    raise DrainingError("the search was aborted: the replica stops")
                pending.prefilled()
                yield encode_beams(delta)
                continue
            had_begun, has_begun = has_begun, has_begun or any(output.token_ids for output in delta.outputs)
            if has_begun:
                pending.prefilled()
            # Those of a long prompt are hundreds of kilobytes, and the same each time.
            yield encode_delta(replace(delta, prompt_logprobs=None) if had_begun else delta)
    except EngineError as error:  # the status was sent already, so the error is a line of its own
        yield encode_error(error)


def _refusal(status: HTTPStatus, error: Exception) -> Response:
    return JSONResponse(encode_refusal(error), status)
