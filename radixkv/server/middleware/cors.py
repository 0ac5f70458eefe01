"""Which web pages may call the server from a browser."""

from __future__ import annotations

from collections.abc import Sequence
from http import HTTPStatus

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from radixkv.server.access.rate_limits import RATE_LIMIT_HEADERS
from radixkv.server.errors import ApiError
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

    def preflight_response(self, request_headers: Headers) -> Response:
        """The response to a preflight request."""
        answer = super().preflight_response(request_headers)
        if answer.status_code == HTTPStatus.OK:
            return answer
        return _Refusal(bytes(answer.body), answer.status_code, answer.headers)


class _Refusal(PlainTextResponse):
    """A refused preflight request, as an error in the format of the API that was to be called."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = {name: value for name, value in self.headers.items() if not name.startswith("content-")}
        error = ApiError(HTTPStatus(self.status_code), bytes(self.body).decode(), headers=headers)
        await error.response(scope)(scope, receive, send)
