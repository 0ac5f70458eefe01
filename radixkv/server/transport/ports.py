"""Which paths are served where, if `metrics_port` is set::

/, /live, /metrics                   on that port only
/health, /ready, /version            on both
/v1/chat/completions                 on both: the page sends requests
everything else                      on the other port only
"""

from __future__ import annotations

from enum import Enum, auto

from starlette.types import ASGIApp, Receive, Scope, Send

# These files hold nothing of any prompt.
PAGE_PATHS = frozenset({"/", "/favicon.svg", "/page.css", "/page.js"})
_STATE_PATHS = PAGE_PATHS | {"/live", "/metrics"}
_COMMON_PATHS = frozenset({"/health", "/ready", "/version", "/v1/chat/completions"})


class Port(Enum):
    """Where a request came in."""

    ONLY = auto()
    """There is one port."""
    API = auto()
    """There are two, and this one is for clients."""
    METRICS = auto()
    """There are two, and this one is for operators."""


def serves(port: Port, path: str) -> bool:
    """Whether a path is there on a port."""
    if port is Port.ONLY or path in _COMMON_PATHS:
        return True
    return (path in _STATE_PATHS) == (port is Port.METRICS)


def port_of(scope: Scope) -> Port:
    """Where a request came in."""
    port: Port = scope.get("state", {}).get("port", Port.ONLY)
    return port


def port_is_private(scope: Scope) -> bool:
    """Whether the port where a request came in is one of two, and only processes of this machine can connect to it."""
    private: bool = scope.get("state", {}).get("port_is_private", False)
    return private


class OnPort:
    """ASGI middleware: notes where requests came in.

    Args:
        app: the application, the same on both ports.
        port: which one this is.
        private: whether only processes of this machine can connect to it.
    """

    def __init__(self, app: ASGIApp, port: Port, *, private: bool) -> None:
        self._app = app
        self._noted = {"port": port, "port_is_private": private}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope.setdefault("state", {}).update(self._noted)
        await self._app(scope, receive, send)
