"""Every example runs as it stands."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from support.loaded_once import models_loaded_once

FOLDER = Path(__file__).parent.parent / "examples"
# tests/server/test_terminal_client.py runs it.
NEEDS_A_SERVER = FOLDER / "terminal_client.py"
# Its searches take long; tests/testing/test_kit.py runs it, and looks at what it finds.
SEARCHES = FOLDER / "test_an_allocator.py"
# Its model must call a function with arguments that it can take.
NEEDS_ALL_LAYERS = FOLDER / "agent_with_tools.py"
EXAMPLES = sorted(set(FOLDER.glob("*.py")) - {NEEDS_A_SERVER, SEARCHES})


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In this process, and with the model in memory: starting one and loading it take longer than most examples.

    Nothing depends on what the model says, so most have a tenth of its layers.
    """
    with models_loaded_once(None if path == NEEDS_ALL_LAYERS else 3):
        runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out.strip()
