"""The example that talks to a server, as a person runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from support.server_process import TENANT_A, ServerProcess

EXAMPLE = Path(__file__).parents[2] / "examples" / "terminal_client.py"


def test_the_terminal_client_talks_to_a_server(server: ServerProcess) -> None:
    command = [sys.executable, EXAMPLE, server.url, TENANT_A]
    turns = "Say hello.\nSay it again.\n"
    result = subprocess.run(command, input=turns, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens reused]") == 2
    assert "[0 of " in result.stdout
