"""Identifies who sent a request before a byte of its body is read. Without a valid key, the server does no more work for it.

Which key a path needs::

    /, /health, /ping, /ready, /version,
    /openapi.json                                   none
    /admin/...                                      the admin key
    /metrics                                        the metrics key; without one, the admin key where there are API keys,
                                                    and none on a port of its own
    /live                                           an API key; without API keys, the metrics key if there is one
    everything else                                 an API key, if there are any; without, on the port of /metrics,
                                                    the metrics key if there is one
"""

from __future__ import annotations

import hmac
import ipaddress
from contextlib import suppress
from http import HTTPStatus
from typing import Annotated, cast
from urllib.parse import urlsplit

from fastapi import Depends, Request
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.server.access.tenants import Tenant, Tenants, unauthorized
from radixkv.server.errors import ApiError
from radixkv.server.transport.ports import PAGE_PATHS, Port, port_is_private, port_of, serves

_OPEN_PATHS = PAGE_PATHS | {"/health", "/ping", "/ready", "/version", "/openapi.json"}


class Authentication:
    """ASGI middleware: answers 401, 403 or 404, or puts the tenant into the scope's state, for `CurrentTenant`.

    Args:
        tenants: who may use the model, and who may administer.
        metrics_key: for /metrics, and for /live where there are no API keys.
        local_only: while there are no API keys, answer only requests whose ``Host`` header names this machine. Otherwise, a
            web site could point its name here (DNS rebinding), and use the server from its visitors' browsers. On a metrics
            port that only this machine can reach, this holds whenever there is no metrics key.
    """

    def __init__(
        self, app: ASGIApp, tenants: Tenants, metrics_key: str | None = None, local_only: bool = False
    ) -> None:
        self._app = app
        self._tenants = tenants
        self._metrics_key = metrics_key
        self._local_only = local_only

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            try:
                self._authenticate(scope)
            except ApiError as error:
                await error.response(scope)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _authenticate(self, scope: Scope) -> None:
        path: str = scope["path"]
        port = port_of(scope)
        if not serves(port, path):
            raise ApiError(HTTPStatus.NOT_FOUND, "Not Found")
        headers = Headers(scope=scope)
        if not _is_local(headers.get("host", "")):
            self._refuse_web_sites(scope)
        if path in _OPEN_PATHS:
            return
        sent = _sent_key(headers)
        if path == "/admin" or path.startswith("/admin/"):
            self._tenants.authenticate_admin(sent)
            scope.setdefault("state", {})["is_admin"] = True
        elif path == "/metrics":
            if self._metrics_key is not None or port is not Port.METRICS:
                self._authenticate_operator(sent)
        else:
            if self._tenants.open_to_all and (path == "/live" or port is Port.METRICS):
                self._authenticate_operator(sent)
            scope.setdefault("state", {})["tenant"] = self._tenants.authenticate(sent)

    def _refuse_web_sites(self, scope: Scope) -> None:
        """Where no key keeps web sites out, refuse requests that do not name this machine."""
        if port_of(scope) is Port.METRICS:
            if self._metrics_key is None and port_is_private(scope):
                message = "without a metrics key, this port answers to localhost only (metrics_key)"
                raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, message)
        elif self._local_only and self._tenants.open_to_all:
            message = (
                "without API keys, this server answers to localhost only (api_keys, keys_file, allow_unauthenticated)"
            )
            raise ApiError(HTTPStatus.MISDIRECTED_REQUEST, message)

    def _authenticate_operator(self, sent: bytes) -> None:
        if self._metrics_key is not None:
            if not hmac.compare_digest(self._metrics_key.encode(), sent):
                raise unauthorized("metrics key")
        elif not self._tenants.open_to_all:
            if not self._tenants.has_admin_key:
                raise ApiError(
                    HTTPStatus.FORBIDDEN,
                    "metrics are off: the server was started with API keys, but neither --metrics-key nor --admin-key",
                )
            self._tenants.authenticate_admin(sent)


def _is_local(host: str) -> bool:
    """Whether a header ``Host`` names this machine, by a name or address that no web site can have."""
    with suppress(ValueError):
        name = urlsplit(f"//{host}").hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ipaddress.ip_address(name).is_loopback
    return False


def _sent_key(headers: Headers) -> bytes:
    """The key in ``Authorization: Bearer``, as OpenAI's clients send it, or in ``x-api-key``, as Anthropic's; b"": none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not key:
        key = headers.get("x-api-key", "")
    return key.strip().encode()


# For the OpenAPI description only.
_Credentials = Annotated[HTTPAuthorizationCredentials | None, Depends(HTTPBearer(auto_error=False))]


# If a route is served without the middleware, these dependencies fail rather than let anyone in. They are coroutines, because
# FastAPI would call plain functions in a thread for each request.


async def administrator(request: Request, described: _Credentials) -> None:
    """A dependency of what is for administrators only."""
    assert request.state.is_admin


async def _current_tenant(request: Request, described: _Credentials) -> Tenant:
    return cast(Tenant, request.state.tenant)


CurrentTenant = Annotated[Tenant, Depends(_current_tenant)]
