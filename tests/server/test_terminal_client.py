"""The example that talks to a server, as a person runs it."""

from __future__ import annotations

from pathlib import Path

from support.preloaded_process import run_preloaded
from support.server_process import TENANT_A, ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "terminal_client.py"


def test_the_terminal_client_talks_to_a_server(server: ServerProcess) -> None:
    turns = "Say hello.\nSay it again.\n"
    result = run_preloaded(EXAMPLE.read_text(), server.url, TENANT_A, stdin=turns)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens reused]") == 2
    assert "[0 of " in result.stdout
