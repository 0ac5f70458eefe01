"""Nothing is done for clients that have disconnected before their request was admitted."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest
from starlette.types import ASGIApp, Message
from support.in_process_server import make_service
from support.time_limit import HANGING

from radixkv import LLM, AsyncLLM
from radixkv.server.access.keys import Key, hash_of
from radixkv.server.access.rate_limits import RateLimits
from radixkv.server.access.tenants import Tenants
from radixkv.server.app import create_app
from radixkv.server.service import Service

MESSAGES = [{"role": "user", "content": "Hi"}]
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"model": "model", "messages": MESSAGES, "max_tokens": 5},
}


async def post(app: ASGIApp, path: str, body: dict[str, Any], key: str, gone: asyncio.Event) -> None:
    """Send a request, and disconnect when ``gone`` is set; returns when the server is done with it."""
    messages: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None: ...

    headers = [(b"content-type", b"application/json"), (b"authorization", f"Bearer {key}".encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 80),
        "scheme": "http",
        "http_version": "1.1",
    }
    async with asyncio.timeout(HANGING):
        await app(scope, receive, send)


def num_ended(service: Service) -> float:
    """How many choices were counted, all of them as aborted."""
    (metric,) = service.metrics.finished.collect()
    (aborted,) = [sample for sample in metric.samples if sample.name.endswith("_total")]
    assert aborted.labels == {"finished_reason": "abort"}
    return aborted.value


@pytest.mark.parametrize("path", REQUESTS)
async def test_who_leaves_while_the_tokenizer_is_busy_is_never_admitted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    go = threading.Event()
    async with AsyncLLM(llm) as engine:
        submitted: list[Any] = []
        run_tokenizer = engine.run_tokenizer
        gone = asyncio.Event()

        async def run_and_leave(*arguments: Any, **options: Any) -> Any:
            gone.set()
            return await run_tokenizer(*arguments, **options)

        async def note(*arguments: Any, **options: Any) -> Any:
            submitted.append(arguments)
            raise AssertionError

        busy = asyncio.create_task(run_tokenizer(lambda _: go.wait(), num_slots=0))
        await asyncio.sleep(0)  # that is the first
        monkeypatch.setattr(engine, "run_tokenizer", run_and_leave)
        monkeypatch.setattr(engine, "submit", note)
        service = make_service(engine, tenants=Tenants(["ann"]))
        try:
            await post(create_app(service), path, REQUESTS[path], "ann", gone)
        finally:
            go.set()
        await busy
        assert not submitted
        assert num_ended(service) == 1


async def test_who_leaves_while_grammars_are_compiled_is_charged_nothing(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncLLM(llm) as engine:
        gone = asyncio.Event()

        async def leave_and_wait(*arguments: Any, **options: Any) -> Any:
            gone.set()
            await asyncio.Event().wait()

        monkeypatch.setattr(engine, "submit", leave_and_wait)
        tenants = Tenants(keys={"ann": Key(sha256=hash_of("a"), tokens_per_minute=1000)})
        service = make_service(engine, tenants=tenants, rate_limits=RateLimits(lambda: 0.0))
        await post(create_app(service), "/v1/completions", {"prompt": "Hi"}, "a", gone)
        (bucket,) = service.rate_limits._buckets.values()
        assert bucket.level == 1000
        assert num_ended(service) == 1
