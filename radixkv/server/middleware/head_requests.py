"""HEAD requests, answered as GET. (FastAPI's routes, unlike Starlette's, refuse them.)"""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class HeadRequests:
    """ASGI middleware: HEAD is routed as GET is. What serves the application leaves out the body, as for any HEAD request."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        # A copy: by the original, the server leaves out the body. What routing adds to it is given back, for tracing.
        routed = {**scope, "method": "GET"}
        try:
            await self._app(routed, receive, send)
        finally:
            scope.update(routed, method="HEAD")
