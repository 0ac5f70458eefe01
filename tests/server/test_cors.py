"""How requests of pages that may not call the server are answered."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.types import Receive, Scope, Send
from support.api_errors import assert_error

from radixkv.server.middleware.cors import Cors


async def nothing(scope: Scope, receive: Receive, send: Send) -> None:
    raise AssertionError("a preflight is answered before")


def preflight(path: str, origin: str, method: str = "POST") -> httpx.Response:
    async def ask() -> httpx.Response:
        transport = httpx.ASGITransport(Cors(nothing, ["https://app.example"]))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            headers = {"Origin": origin, "Access-Control-Request-Method": method}
            return await client.options(path, headers=headers)

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("origin", "method", "message"),
    [
        ("https://other.example", "POST", "Disallowed CORS origin"),
        ("https://app.example", "PATCH", "Disallowed CORS method"),
        ("https://other.example", "PATCH", "Disallowed CORS origin, method"),
    ],
)
def test_a_refused_preflight_has_the_form_of_the_api_s_errors(origin: str, method: str, message: str) -> None:
    """It was plain text."""
    refused = preflight("/v1/chat/completions", origin, method)
    assert_error(refused, 400, message=message, param=None, code=None)
    assert "Origin" in refused.headers["vary"]
    refused = preflight("/v1/messages", origin, method)
    assert refused.status_code == 400
    assert refused.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": message}}


def test_an_allowed_preflight_names_what_the_page_may_send() -> None:
    allowed = preflight("/v1/messages", "https://app.example")
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://app.example"
    assert "DELETE" in allowed.headers["access-control-allow-methods"]
