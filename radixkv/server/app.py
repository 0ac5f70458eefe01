"""All routes of one server."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from starlette.types import ASGIApp

from radixkv import __version__
from radixkv.server.access.authentication import Authentication
from radixkv.server.access.rate_limits import RateLimitHeaders
from radixkv.server.api_description import api_description_routes
from radixkv.server.chat.routes import chat_completion_routes
from radixkv.server.completions import completion_routes
from radixkv.server.errors import ERROR_STATUSES, ErrorBody, add_error_handlers
from radixkv.server.messages.routes import message_routes
from radixkv.server.middleware.body_limit import BodyLimit
from radixkv.server.middleware.cors import Cors
from radixkv.server.middleware.head_requests import HeadRequests
from radixkv.server.middleware.request_log import RequestLog
from radixkv.server.operation.admin import admin_routes, cache_routes
from radixkv.server.operation.live_state import live_state_routes
from radixkv.server.operation.metrics import metrics_routes
from radixkv.server.operation.models import model_routes
from radixkv.server.operation.page import page_routes
from radixkv.server.operation.pins import EnginePins, pin_routes
from radixkv.server.responses.routes import response_routes
from radixkv.server.service import Service
from radixkv.server.tokenization import tokenization_routes

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer


def create_app(
    service: Service,
    *,
    write_log: Callable[[str], object] | None = None,
    tracer: Tracer | None = None,
    engine_routes: Sequence[APIRouter] = (),
) -> ASGIApp:
    """The server as an ASGI application.

    Args:
        service: what its routes share.
        write_log: called with each line of the access log; None: there is none.
        tracer: records spans of every request; None: nothing is recorded.
        engine_routes: replace the routes that look into the one engine, where several engines are served.
    """
    config = service.config
    app = FastAPI(
        title="RadixKV",
        version=__version__,
        # FastAPI's pages would load scripts from another host; for the document itself, see `api_description_routes`.
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        responses={code: {"model": ErrorBody} for code in ERROR_STATUSES},
    )
    # The middleware that is added last is the outermost.
    app.add_middleware(HeadRequests)
    app.add_middleware(BodyLimit, max_bytes=config.max_body_bytes)
    app.add_middleware(RateLimitHeaders, limits=service.rate_limits)
    app.add_middleware(
        Authentication,
        tenants=service.tenants,
        metrics_key=config.metrics_key,
        # Browsers cannot connect to Unix sockets.
        local_only=config.uds is None and not config.allow_unauthenticated,
    )
    if config.cors_origins:
        app.add_middleware(Cors, origins=config.cors_origins)
    if service.engine is not None:
        engine_routes = (
            live_state_routes(service, service.engine),
            cache_routes(service.engine),
            pin_routes(service, EnginePins(service.engine)),
        )
    routers = (
        chat_completion_routes(service),
        completion_routes(service),
        response_routes(service),
        message_routes(service),
        tokenization_routes(service),
        model_routes(service),
        metrics_routes(service.metrics),
        admin_routes(service),
        page_routes(),
        api_description_routes(app),
        *engine_routes,
    )
    for router in routers:
        app.include_router(router)
    add_error_handlers(
        app, {route.path for router in routers for route in router.routes if isinstance(route, APIRoute)}
    )
    if tracer is None:
        return RequestLog(app, write_log)
    # Imported only here: it needs packages that nothing else in the server needs.
    from radixkv.server.middleware.tracing import Tracing

    return RequestLog(Tracing(app, tracer), write_log)
