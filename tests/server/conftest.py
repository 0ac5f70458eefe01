"""Servers with two tenants, for all tests of the server: on a tiny random model, and on the default model."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from support.server_process import MODEL, TENANT_A, TENANT_B, ServerProcess

_OPTIONS = ("--api-key", TENANT_A, "--api-key", TENANT_B, "--num-blocks", "2000")


@pytest.fixture(scope="session")
def shared_server(tiny_model_folder: Path) -> Iterator[ServerProcess]:
    with ServerProcess(str(tiny_model_folder), "--served-model-name", MODEL, *_OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def shared_default_server() -> Iterator[ServerProcess]:
    with ServerProcess(*_OPTIONS) as server:
        yield server


@pytest.fixture
def server(shared_server: ServerProcess) -> Iterator[ServerProcess]:
    """The server with an empty cache; afterwards nothing runs, every block is free or cached, and the cache's checks pass."""
    yield from _with_empty_cache(shared_server)


@pytest.fixture
def default_server(shared_default_server: ServerProcess) -> Iterator[ServerProcess]:
    """The same on the default model, for tests that read what it says, or do something while it says it."""
    yield from _with_empty_cache(shared_default_server)


def _with_empty_cache(server: ServerProcess) -> Iterator[ServerProcess]:
    server.admin("clear_cache", {})
    yield server
    deadline = time.monotonic() + 600
    while (state := server.admin("check"))["running_requests"] + state["waiting_requests"]:
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


@pytest.fixture
def default_http(default_server: ServerProcess) -> Iterator[httpx.Client]:
    with default_server.client(TENANT_A) as client:
        yield client


@pytest.fixture
def default_client(default_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with default_server.openai(TENANT_A) as client:
        yield client
