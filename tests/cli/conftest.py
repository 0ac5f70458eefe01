"""What several tests of commands need."""

from __future__ import annotations

from typing import Any

import pytest
from support.serve_command import Serve, command

from radixkv.server import run
from radixkv.server.config import ServerConfig


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Serve:
    """Run the command without serving; returns what the server and its engine would get."""
    received: list[Any] = []

    def run_server(config: ServerConfig, options: dict[str, Any]) -> int:
        received[:] = [config, options]
        return 0

    monkeypatch.setattr(run, "run_server", run_server)

    def call(*arguments: str, **environment: str) -> tuple[ServerConfig, dict[str, Any]]:
        result = command(*arguments, **environment)
        assert result.exit_code == 0, result.output
        config, options = received
        return config, options

    return call
