"""Clients without a key cost nothing, and what is wrong with a request is found early."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest
from pydantic import BaseModel, ValidationError
from starlette.types import Message, Receive, Scope, Send
from support.in_process_server import served
from support.tenant_keys import bearer

from radixkv import LLM
from radixkv.server.access.authentication import Authentication
from radixkv.server.access.tenants import Tenants
from radixkv.server.chat.routes import ChatCompletionRequest
from radixkv.server.completions import CompletionRequest
from radixkv.server.config import ServerConfig
from radixkv.server.messages.request import MessagesRequest
from radixkv.server.operation.admin import ClearRequest
from radixkv.server.responses.request import ResponseRequest
from radixkv.server.tokenization import DetokenizeRequest, TokenizeRequest
from radixkv.server.transport.ports import OnPort, Port

ANN, BOB, ADMIN, METRICS = "key-of-ann", "key-of-bob", "key-of-admin", "key-of-metrics"


class Endpoint:
    """An application that notes whether it was reached, and by whom."""

    def __init__(self) -> None:
        self.tenants: list[Any] = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.tenants.append(scope.get("state", {}).get("tenant"))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})


def answer(
    path: str,
    headers: dict[str, str],
    tenants: Tenants,
    metrics_key: str | None = None,
    local_only: bool = False,
    port: Port = Port.ONLY,
    private: bool = False,
) -> tuple[int, Any]:
    """The status, and the tenant for whom the application was called; it must not read the body."""
    endpoint, sent = Endpoint(), list[Message]()

    async def receive() -> Message:
        raise AssertionError("the body was read")

    async def send(message: Message) -> None:
        sent.append(message)

    encoded = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": encoded}
    app = OnPort(Authentication(endpoint, tenants, metrics_key, local_only), port, private=private)
    asyncio.run(app(scope, receive, send))
    status: int = sent[0]["status"]
    assert (status == 200) == bool(endpoint.tenants)
    return status, endpoint.tenants[0] if endpoint.tenants else None


@pytest.mark.parametrize(
    "path", ["/v1/completions", "/v1/whatever/comes", "/tokenize", "/detokenize", "/live", "/v1/models", "/nothing"]
)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        bearer("wrong"),
        bearer(""),
        bearer(ADMIN),
        bearer(f"{ANN}x"),
        bearer("caf\xe9"),
        {"authorization": ANN},
        {"authorization": f"Basic {ANN}"},
        {"x-api-key": "wrong"},
    ],
    ids=str,
)
def test_without_a_key_the_body_is_not_read(path: str, headers: dict[str, str]) -> None:
    assert answer(path, headers, Tenants([ANN, BOB], ADMIN), METRICS) == (401, None)


def test_a_key_is_accepted_in_both_headers() -> None:
    tenants = Tenants([ANN, BOB], ADMIN)
    ann, bob = (answer("/v1/completions", bearer(key), tenants)[1] for key in (ANN, BOB))
    assert ann.namespace() != bob.namespace()
    assert answer("/v1/messages", {"x-api-key": BOB}, tenants) == (200, bob)
    assert answer("/v1/messages", {"authorization": f"bearer  {ANN} ", "x-api-key": "other"}, tenants) == (200, ann)


@pytest.mark.parametrize("path", ["/admin", "/admin/check", "/admin/pins/pin-1", "/admin/not/there"])
def test_administration_needs_the_admin_key(path: str) -> None:
    tenants = Tenants([ANN], ADMIN)
    assert answer(path, bearer(ADMIN), tenants) == (200, None)
    for headers in ({}, bearer(ANN), bearer(METRICS)):
        assert answer(path, headers, tenants, METRICS) == (401, None)
        assert answer(path, headers, Tenants([ANN])) == (403, None)
        assert answer(path, headers, Tenants()) == (403, None)


def test_who_may_read_the_metrics() -> None:
    """Metrics reveal how long all prompts were, so where there are API keys, they need one."""

    def status(headers: dict[str, str], tenants: Tenants, metrics_key: str | None = None) -> int:
        return answer("/metrics", headers, tenants, metrics_key)[0]

    assert status({}, Tenants()) == 200
    assert status({}, Tenants([ANN])) == 403
    assert status({}, Tenants([ANN], ADMIN)) == 401
    assert status(bearer(ANN), Tenants([ANN], ADMIN)) == 401
    assert status(bearer(ADMIN), Tenants([ANN], ADMIN)) == 200
    for tenants in (Tenants(), Tenants([ANN], ADMIN)):
        assert status(bearer(METRICS), tenants, METRICS) == 200
        for key in (ANN, ADMIN, "wrong"):
            assert status(bearer(key), tenants, METRICS) == 401
    assert answer("/live", {}, Tenants())[0] == 200
    assert answer("/live", {}, Tenants(), METRICS)[0] == 401
    assert answer("/live", bearer(METRICS), Tenants(), METRICS)[0] == 200
    assert answer("/live", bearer(METRICS), Tenants([ANN]), METRICS)[0] == 401
    assert answer("/v1/completions", {}, Tenants(), METRICS)[0] == 200


def test_what_is_served_on_a_port_of_the_metrics() -> None:
    def status(path: str, port: Port, key: str | None = None, **options: Any) -> int:
        return answer(
            path, {} if key is None else bearer(key), **{"tenants": Tenants([ANN], ADMIN), **options}, port=port
        )[0]

    for path in ("/", "/page.js", "/metrics", "/live"):
        assert status(path, Port.API, ADMIN) == 404
    for path in ("/v1/completions", "/v1/models", "/admin/check", "/openapi.json", "/no/such/path"):
        assert status(path, Port.METRICS, ADMIN) == 404
    for port in Port:
        assert status("/health", port) == 200
        assert status("/v1/chat/completions", port) == 401
        assert status("/v1/chat/completions", port, ANN) == 200
    # All clients that reach the port may read totals; texts need a key as ever.
    assert status("/metrics", Port.METRICS) == 200
    assert status("/metrics", Port.METRICS, metrics_key=METRICS) == 401
    assert status("/metrics", Port.METRICS, METRICS, metrics_key=METRICS) == 200
    assert status("/live", Port.METRICS) == 401
    assert status("/live", Port.METRICS, ANN) == 200
    # Without API keys, other machines may use that port only with a metrics key.
    for path in ("/live", "/v1/chat/completions"):
        assert status(path, Port.METRICS, tenants=Tenants(), metrics_key=METRICS) == 401
        assert status(path, Port.METRICS, METRICS, tenants=Tenants(), metrics_key=METRICS) == 200
        assert status(path, Port.METRICS, tenants=Tenants()) == 200


@pytest.mark.parametrize("path", ["/", "/page.js", "/health", "/ready", "/version", "/openapi.json"])
def test_what_needs_no_key(path: str) -> None:
    assert answer(path, {}, Tenants([ANN], ADMIN), METRICS) == (200, None)


@pytest.mark.parametrize(
    ("host", "local"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("model.localhost:8000", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("192.168.0.7:8000", False),
        ("evil.example@localhost.evil.example", False),
        ("[::1", False),
        ("", False),
    ],
)
def test_without_keys_no_web_site_can_be_a_client_in_a_visitor_s_browser(host: str, local: bool) -> None:
    for path in ("/live", "/v1/completions", "/"):
        assert answer(path, {"host": host}, Tenants(), local_only=True)[0] == (200 if local else 421)
        assert answer(path, {"host": host}, Tenants(), local_only=False)[0] == 200
        # Where there are keys, a site would need one.
        assert answer(path, {"host": host} | bearer(ANN), Tenants([ANN]), local_only=True)[0] == 200


def test_no_web_site_reads_the_metrics_in_an_operator_s_browser() -> None:
    """Neither where there are API keys, nor beside a Unix socket or a server that is open to all."""

    def status(path: str, host: str, tenants: Tenants, key: str | None = None, private: bool = True) -> int:
        return answer(path, {"host": host}, tenants, key, False, Port.METRICS, private)[0]

    for tenants in (Tenants([ANN], ADMIN), Tenants()):
        for path in ("/metrics", "/", "/health"):
            assert status(path, "evil.example:9090", tenants) == 421
            assert status(path, "localhost:9090", tenants) == 200
            # Other machines reach it by a name that is not known here.
            assert status(path, "metrics.example:9090", tenants, private=False) == 200
    # A site would need the key.
    assert status("/metrics", "evil.example:9090", Tenants(), METRICS) == 401
    headers = {"host": "metrics.example:9090"} | bearer(METRICS)
    for path in ("/metrics", "/live", "/v1/chat/completions"):
        assert answer(path, headers, Tenants(), METRICS, True, Port.METRICS)[0] == 200


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (CompletionRequest, {"prompt": [{}] * 10_000}),
        (CompletionRequest, {"prompt": [[{}] * 10_000] * 2}),
        (CompletionRequest, {"prompt": ["x"] * 10_000}),
        (CompletionRequest, {"prompt": "x", "stop_token_ids": ["x"] * 10_000}),
        (CompletionRequest, {"prompt": "x", "structured_outputs": {"choice": [1] * 10_000}}),
        (CompletionRequest, {"prompt": "x"} | {f"field {number}": 1 for number in range(10_000)}),
        (CompletionRequest, {"prompt": "x", "logit_bias": {f"{number}": "x" for number in range(10_000)}}),
        (ChatCompletionRequest, {"messages": [1] * 10_000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": ""}] * 10_000}),
        (ChatCompletionRequest, {"messages": [{"role": "user", "content": [1] * 10_000}]}),
        (ChatCompletionRequest, {"messages": [{f"field {number}": 1 for number in range(10_000)}]}),
        (TokenizeRequest, {"messages": [{}] * 10_000}),
        (DetokenizeRequest, {"tokens": [""] * 10_000}),
        (MessagesRequest, {"messages": [1] * 10_000, "model": "x", "max_tokens": 1}),
        (ResponseRequest, {"input": [{}] * 10_000}),
        (ClearRequest, {f"field {number}": 1 for number in range(10_000)}),
    ],
)
def test_validation_stops_at_the_first_errors(model: type[BaseModel], body: dict[str, Any]) -> None:
    """One error per element used to take 9.5 s of CPU and 2.8 GB for a megabyte of `{"prompt": [{}, {}, ...]}`."""
    with pytest.raises(ValidationError) as raised:
        model.model_validate(body)
    assert raised.value.error_count() <= 8


async def test_a_request_without_a_key_is_refused_before_its_body_is_parsed(llm: LLM) -> None:
    async with served(llm, tenants=Tenants([ANN], ADMIN), config=ServerConfig(metrics_key=METRICS)) as client:

        async def post(path: str, **headers: str) -> httpx.Response:
            response = await client.post(path, content=b"{", headers={"content-type": "application/json", **headers})
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}
            return response

        for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/admin/clear_cache"):
            refused = await post(path)
            assert refused.status_code == 401
            assert refused.headers["www-authenticate"] == "Bearer"
            key = ADMIN if path.startswith("/admin") else ANN
            assert (await post(path, **bearer(key))).status_code == 400
        assert (await client.get("/metrics", headers=bearer(METRICS))).status_code == 200
        described = (await client.get("/openapi.json")).json()["paths"]
        assert described["/v1/completions"]["post"]["security"] == [{"HTTPBearer": []}]
        assert described["/admin/check"]["post"]["security"] == [{"HTTPBearer": []}]
