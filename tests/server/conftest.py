"""One server on the default model, with two tenants, for all tests of the server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import httpx
import openai
import pytest
from support.server_process import TENANT_A, TENANT_B, ServerProcess


@pytest.fixture(scope="session")
def shared_server() -> Iterator[ServerProcess]:
    with ServerProcess("--api-key", TENANT_A, "--api-key", TENANT_B, "--num-blocks", "2000") as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The server with an empty cache; afterwards nothing runs, every block is free or cached, and the cache's checks pass."""
    shared_server.admin("clear_cache", {})
    yield shared_server
    deadline = time.monotonic() + 600
    while (state := shared_server.admin("check"))["running_requests"] + state["waiting_requests"]:
        assert time.monotonic() < deadline, f"requests of disconnected clients still run: {state}"
    assert state["blocks_in_use"] == 0
    assert state["free_blocks"] + state["evictable_blocks"] == 2000


@pytest.fixture
def http(server: ServerProcess) -> Iterator[httpx.Client]:
    with server.client(TENANT_A) as client:
        yield client


@pytest.fixture
def client(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.openai(TENANT_A) as client:
        yield client
