"""Which web pages may call the server from a browser."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.server.access.rate_limits import RATE_LIMIT_HEADERS
from radixkv.server.middleware.request_log import ANSWER_HEADERS
from radixkv.server.transport.ports import Port, port_of


class Cors(CORSMiddleware):
    """ASGI middleware: lets pages of some origins be clients, but none on a metrics port, which may need no key.

    Args:
        origins: the allowed ones; "*": any.
    """

    def __init__(self, app: ASGIApp, origins: Sequence[str]) -> None:
        super().__init__(
            app,
            allow_origins=list(origins),
            allow_methods=["GET", "HEAD", "POST", "DELETE"],
            allow_headers=["*"],
            expose_headers=[*ANSWER_HEADERS, *RATE_LIMIT_HEADERS, "Retry-After", "X-Should-Retry"],
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if port_of(scope) is Port.METRICS:
            await self.app(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)
