"""The servers that benches start."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
from rich.console import Console

from radixkv.bench.serving import server_process
from radixkv.bench.serving.attacks import run_attacks
from radixkv.bench.serving.soak import run_soak_server


@pytest.mark.parametrize(
    "run",
    [
        lambda console: run_attacks(console, 1.0, 0, None, None),
        lambda console: run_soak_server(console, 1.0, 0, 4.0, 1.0, None),
    ],
    ids=["attacks", "soak-server"],
)
def test_the_command_of_a_server_that_does_not_start_has_no_keys(
    run: Callable[[Console], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys are in the environment: the message printed them, as lists of processes did."""
    monkeypatch.setattr(server_process.sys, "executable", shutil.which("false"))
    with pytest.raises(ValueError, match=r"^`radixkv serve --port 0 (?!.*key).*` did not start; run it to see why$"):
        run(Console())
