"""Every example runs as it stands."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from support.loaded_once import models_loaded_once
from support.server_process import ServerProcess

FOLDER = Path(__file__).parent.parent / "examples"
NEEDS_A_SERVER = FOLDER / "terminal_client.py"
# Its searches take long; tests/testing/test_kit.py runs it, and looks at what it finds.
SEARCHES = FOLDER / "test_an_allocator.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {NEEDS_A_SERVER, SEARCHES})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, and with the model in memory: starting one and loading it take longer than most examples."""
    with models_loaded_once():
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()


def test_the_terminal_client_talks_to_a_server() -> None:
    with ServerProcess("--api-key", "a-key") as server:
        command = [sys.executable, NEEDS_A_SERVER, server.url, "a-key"]
        turns = "Say hello.\nSay it again.\n"
        result = subprocess.run(command, input=turns, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count("prompt tokens reused]") == 2
    assert "[0 of " in result.stdout
