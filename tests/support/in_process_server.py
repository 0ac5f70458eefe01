"""The server's application in the test's own process: no socket, and no second model."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from radixkv import LLM, AsyncLLM
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.metrics import ServerMetrics
from radixkv.server.service import Service, max_token_characters
from radixkv.server.tenants import Tenants
from radixkv.server.token_text import TokenTexts


def make_service(llm: AsyncLLM, **changes: Any) -> Service:
    """A service over an engine; ``changes`` are fields of `Service`."""
    fields: dict[str, Any] = {
        "llm": llm,
        "model_name": "model",
        "tenants": Tenants(),
        "metrics": ServerMetrics(llm),
        "token_texts": TokenTexts(llm.loaded.tokenizer),
        "max_token_characters": max_token_characters(llm.loaded),
        "started": int(time.time()),
        "drain": llm.start_draining,
        "engine": llm,
    }
    return Service(**fields | changes)


def make_client(
    llm: AsyncLLM,
    *,
    config: ServerConfig | None = None,
    write_log: Callable[[str], object] | None = None,
    tracer: Any = None,
    **changes: Any,
) -> httpx.AsyncClient:
    """A client of `make_service`; the options are those of `create_app`."""
    app = create_app(make_service(llm, **changes), config or ServerConfig(), write_log=write_log, tracer=tracer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@asynccontextmanager
async def client_of(llm: LLM, tenants: Tenants, **changes: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server over this engine, which these tenants share; ``changes`` are as for `make_client`."""
    async with (
        AsyncLLM(llm, tenants=tenants.shares) as engine,
        make_client(engine, tenants=tenants, **changes) as client,
    ):
        yield client


def serve(llm: LLM, scenario: Callable[[httpx.AsyncClient], Awaitable[None]], **changes: Any) -> None:
    """Run a scenario against a server over this engine."""

    async def main() -> None:
        async with AsyncLLM(llm) as engine, make_client(engine, **changes) as client:
            await scenario(client)

    asyncio.run(main())
