"""The server's application in the test's own process: no socket, and no second model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import cache
from typing import Any
from unittest.mock import AsyncMock, Mock, patch

import httpx

from radixkv import LLM, AsyncLLM
from radixkv.server.access.tenants import Tenants
from radixkv.server.app import create_app
from radixkv.server.config import ServerConfig
from radixkv.server.service import Service, max_token_characters

# Looked for once in a tokenizer, of all the services that have it: that takes a third of what a service takes to make.
_MAX_TOKEN_CHARACTERS = cache(max_token_characters)


def idle_model() -> Any:
    """Stands in for a model that is served, and gets no request."""
    llm = Mock(death=None, num_slots_taken=0, shutdown=AsyncMock(return_value=True))
    llm.wait_for_death = asyncio.Event().wait
    return llm


def make_service(
    llm: AsyncLLM, *, config: ServerConfig | None = None, tenants: Tenants | None = None, **changes: Any
) -> Service:
    """A service over an engine, whose model is called "model" unless ``config`` says otherwise; it is open to all by default.

    Args:
        changes: further fields of `Service`.
    """
    config = config or ServerConfig()
    config = config.model_copy(update={"served_model_name": config.served_model_name or ("model",)})
    with patch("radixkv.server.service.max_token_characters", _MAX_TOKEN_CHARACTERS):
        return Service(llm, config, tenants or Tenants(), llm.start_draining, engine=llm, **changes)


def make_client(
    llm: AsyncLLM,
    *,
    write_log: Callable[[str], object] | None = None,
    tracer: Any = None,
    **options: Any,
) -> httpx.AsyncClient:
    """A client of `make_service`, whose ``options`` it takes, and of `create_app`."""
    app = create_app(make_service(llm, **options), write_log=write_log, tracer=tracer)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://localhost")


@asynccontextmanager
async def served(llm: LLM, *, tenants: Tenants | None = None, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server over this engine, which the tenants share; ``options`` are as for `make_client`."""
    tenants = tenants or Tenants()
    async with (
        AsyncLLM(llm, tenants=tenants.shares) as engine,
        make_client(engine, tenants=tenants, **options) as client,
    ):
        yield client
