"""The servers that benches start."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from radixkv.bench.serving import attacks, server_process, soak
from radixkv.bench.serving.attacks import AttackCost, run_attacks
from radixkv.bench.serving.soak import ServerSoak, run_soak_server
from radixkv.cli.consoles import console_for


@pytest.mark.parametrize(
    "run",
    [
        lambda console: run_attacks(console, 1.0, 0, None, None),
        lambda console: run_soak_server(console, 1.0, 0, None),
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


def started(*_: object, **__: object) -> Any:
    """A server without a process."""
    return nullcontext(SimpleNamespace(address="", pid=1))


def test_what_attacks_cost_is_written_with_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was elsewhere in this file and two others than in those of the other benches."""

    async def measured(*_: object) -> list[AttackCost]:
        return [AttackCost("nobody attacks", first_token=0.5)]

    monkeypatch.setattr(attacks, "server_process", started)
    monkeypatch.setattr(attacks, "measure_attacks", measured)
    run_attacks(Console(quiet=True), 1.0, 0, None, tmp_path / "attacks.json")
    document = json.loads((tmp_path / "attacks.json").read_text())
    assert "cpu" in document["machine"]
    assert [cost["first_token"] for cost in document["costs"]["this version"]] == [0.5]


def test_a_failed_answer_is_printed_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it has in brackets was taken for markup, which ended the command before its figures were written."""

    watched: dict[str, Any] = {name: [100] for name in ("rss", "open_files", "metrics", "log_bytes")}

    async def broken(*_: object) -> ServerSoak:
        return ServerSoak(1, ["What is a tree? '[red] oak [/INST]'"], waits=[1.0], stalls=[0.1], **watched)

    monkeypatch.setattr(soak, "server_process", started)
    monkeypatch.setattr(soak, "soak", broken)
    monkeypatch.setenv("COLUMNS", "200")
    assert not run_soak_server(console_for(), 1.0, 0, tmp_path / "soak.json")
    assert "What is a tree? '[red] oak [/INST]'" in capsys.readouterr().out
    assert "cpu" in json.loads((tmp_path / "soak.json").read_text())["machine"]
