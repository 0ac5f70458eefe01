"""The first light's parts: each runs in its own process, bounded in time, is saved at once, and can be resumed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support.time_limit import HANGING

from radixkv.bench.gpu import part_process
from radixkv.bench.gpu.first_light import FirstLight, Part, run_first_light
from radixkv.bench.gpu.first_light_parts import first_light_parts
from radixkv.bench.gpu.targets import next_steps


def part(name: str, script: str, seconds: float = 60, **options: Any) -> Part:
    """A shell script, which gets as ``$1`` the file that it may write."""
    return Part(name, seconds, ["sh", "-c", script, "sh", "{json}"], advice=f"advice of {name}", **options)


REPORT = {"machine": {"gpu": "X"}, "limits": {"read_bytes_per_s": 4.46e12}, "rows": [], "failed": {}}
WRITE = f"echo '{json.dumps(REPORT)}' > $1"
CRASH = "echo about to crash; kill -SEGV $$"


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())["parts"]  # type: ignore[no-any-return]


def run(path: Path | None, parts: Sequence[Part], **options: Any) -> bool:
    return run_first_light(Console(), path, parts, **options)


def test_a_crash_takes_nothing_else_along(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "light.json"
    missing = part("not here", "exit 1", missing="there is no such tool here")
    assert not run(path, [part("crash", CRASH), missing, part("figures", WRITE)])
    results = read(path)
    assert [results[name]["status"] for name in ("crash", "not here", "figures")] == ["failed", "skipped", "done"]
    assert results["crash"]["exit_status"] == -11
    assert results["crash"]["last_lines"] == ["about to crash"]
    assert results["figures"]["report"] == REPORT
    printed = capfd.readouterr().out
    assert "about to crash" in printed
    assert re.search("- crash failed after [0-9]+ s: advice of crash", printed)
    with pytest.raises(ValueError, match=r"--json: .* is there already; --resume adds to it"):
        run(path, [part("figures", WRITE)], only=["figures"])
    assert run(tmp_path / "another.json", [missing, part("figures", WRITE)])


def test_a_program_that_does_not_exist_takes_nothing_else_along(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    nowhere = Part("nowhere", 60, [str(tmp_path / "no such tool")], advice="install it")
    assert not run(path, [nowhere, part("figures", WRITE)])
    results = read(path)
    assert [results[name]["status"] for name in ("nowhere", "figures")] == ["failed", "done"]
    assert "No such file" in results["nowhere"]["last_lines"][0]


def test_rows_that_nothing_follows_from_take_nothing_else_along(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    odd = {**REPORT, "rows": [{"name": "flat 256 x 4,096"}]}
    assert not run(path, [part("odd", f"echo '{json.dumps(odd)}' > $1"), part("b", "exit 1")])
    lines = json.loads(path.read_text())["next"]
    assert re.fullmatch("b failed after [0-9]+ s: advice of b", lines[0])
    assert lines[1:] == ["what follows from the rows cannot be said: KeyError: 'ratio'"]


def test_where_nothing_can_be_written_nothing_is_begun(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        run(tmp_path / "missing" / "light.json", [part("a", f"touch {tmp_path}/begun")])
    assert not (tmp_path / "begun").exists()


def test_all_runs_together_are_bounded(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    parts = [part("a", "true"), part("b", "true")]
    assert run(path, parts, only=["a"])
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "seconds": 30 * 60 - 20}))
    assert not run(path, parts, resume=True)
    assert list(read(path)) == ["a"]
    assert json.loads(path.read_text())["next"] == ["not finished: b: run again with --resume and more --total-minutes"]
    assert run(path, parts, resume=True, total_minutes=31)


def test_what_a_part_gave_is_kept_until_it_runs_again(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    parts = [part("a", WRITE), part("b", "true")]
    assert run(path, parts)
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "seconds": 30 * 60 - 20}))
    assert not run(path, parts, resume=True, only=["a"])
    assert read(path)["a"]["report"] == REPORT
    assert json.loads(path.read_text())["next"][-1].startswith("not finished: a: run again with --resume and more")


def test_whoever_ends_it_ends_what_it_started(tmp_path: Path) -> None:
    """Otherwise it would go on holding the GPU. Figures up to there are kept."""
    path, alive = tmp_path / "light.json", tmp_path / "alive"
    with pytest.raises(SystemExit):
        run(path, [part("hangs", f"{WRITE}; mkfifo {alive}; exec 3<>{alive}; kill -TERM $PPID; sleep infinity")])
    with os.fdopen(os.open(alive, os.O_RDONLY | os.O_NONBLOCK)) as pipe:
        os.set_blocking(pipe.fileno(), True)
        assert pipe.read() == ""  # which ends with the last process that could write to it
    assert read(path)["hangs"]["status"] == "cut short"


def test_a_signal_while_a_part_is_started_ends_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal between the start of the process and the moment its id was known used to leave it running alone."""
    started = []

    class Signalled(subprocess.Popen[str]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Signalled)
    monkeypatch.setattr(part_process, "_LAST_WORDS_SECONDS", HANGING)  # dies of the first signal, however late
    with pytest.raises(SystemExit):
        run(tmp_path / "light.json", [part("hangs", "sleep infinity")])
    try:
        assert started[0].poll() == -signal.SIGABRT
    finally:
        started[0].kill()


def is_read(pipe: Path) -> bool:
    """Whether a process has a named pipe open for reading, or waits to open it."""
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return False
    return True


def simulate_clock(monkeypatch: pytest.MonkeyPatch, begun: Path, seconds: float) -> Callable[[], float]:
    """That many seconds pass once the file exists, and none before; polling does not wait."""
    monkeypatch.setattr(part_process, "_POLL_SECONDS", 0.1)
    return lambda: seconds if begun.exists() else 0.0


def test_a_part_that_never_ends_is_ended_with_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, alive = tmp_path / "light.json", tmp_path / "alive"
    hangs = part(
        "hangs", f"{WRITE}; mkfifo {alive}; (cat; touch {tmp_path}/survived) < {alive} & cat {alive}", seconds=40
    )
    light = FirstLight(Console(), path, simulate_clock(monkeypatch, alive, 40.0))
    assert light.run([hangs, part("next", "true")], 100)
    assert {name: result["status"] for name, result in read(path).items()} == {"hangs": "timed out", "next": "done"}
    assert read(path)["hangs"]["report"] == REPORT
    while is_read(alive):  # whoever was killed may take a moment to end
        pass
    assert not (tmp_path / "survived").exists()


def test_where_a_part_hangs_is_in_its_last_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, begun = tmp_path / "light.json", tmp_path / "begun"
    # The clock moves when `begun` is there: by then the process must be inside the function.
    script = (
        f"import os\ndef waits_forever():\n    os.mkfifo({str(begun)!r})\n    open({str(begun)!r})\nwaits_forever()"
    )
    hangs = Part("hangs", 40, [sys.executable, "-S", "-c", script], advice="")
    light = FirstLight(Console(), path, simulate_clock(monkeypatch, begun, 40.0))
    monkeypatch.setattr(part_process, "_LAST_WORDS_SECONDS", HANGING)
    light.run([hangs], 100)
    assert read(path)["hangs"]["status"] == "timed out"
    assert any("in waits_forever" in line for line in read(path)["hangs"]["last_lines"])


def test_what_the_time_did_not_suffice_for_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The part that was cut short gets its own file back; the parts before it are not run again."""
    path, count = tmp_path / "light.json", tmp_path / "count"
    endless = part("long", f"{WRITE}; mkfifo {tmp_path}/f; cat {tmp_path}/f", seconds=10_000)
    parts = [part("first", f"echo . >> {count}"), endless, part("last", "true")]
    light = FirstLight(Console(), path, simulate_clock(monkeypatch, tmp_path / "f", 300.0))
    assert not light.run(parts, 5)
    assert {name: result["status"] for name, result in read(path).items()} == {"first": "done", "long": "cut short"}
    assert light.report(parts)[-1] == "not finished: long, last: run again with --resume"
    parts[1] = part("long", "grep -q bytes_per_s $1")
    assert run(path, parts, resume=True)
    assert [result["status"] for result in read(path).values()] == ["done"] * 3
    assert count.read_text() == ".\n"
    assert run(path, parts, resume=True, only=["first"])
    assert count.read_text() == ".\n.\n"


def test_nothing_is_begun_that_cannot_be_finished(tmp_path: Path) -> None:
    path = tmp_path / "light.json"
    assert not run(path, [part("a", "true"), part("b", "true")], minutes=0.5)
    assert read(path) == {}


def test_without_a_gpu_nothing_else_is_tried(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "light.json"
    parts = [part("limits", "exit 1", needed=True), part("b", "true")]
    for resume in (False, True):  # where the driver is repaired meanwhile, it is tried again
        assert not run(path, parts, resume=resume)
        assert list(read(path)) == ["limits"]
        assert capfd.readouterr().out.count("1/2 limits") == 1


def test_parts_that_do_not_exist_are_refused() -> None:
    parts = [part("a", "true"), part("b", "false")]
    with pytest.raises(ValueError, match="--only: expected one of a, b, got 'c'"):
        run(None, parts, only=["c"])
    with pytest.raises(ValueError, match="--skip: expected one of a, b, got 'c'"):
        run(None, parts, skip=["c"])
    with pytest.raises(ValueError, match="--resume: expected --json"):
        run(None, parts, resume=True)
    assert run(None, parts, skip=["b"])


def test_every_part_exists_and_fits_into_ten_minutes() -> None:
    parts = first_light_parts()
    assert len({part.name for part in parts}) == len(parts)
    assert [each.name for each in parts if each.needed] == ["ready", "limits"]
    for each in parts:
        assert each.seconds <= 9 * 60
        assert each.advice
        tests = [argument for argument in each.command if argument.endswith(".py")]
        assert all(Path(path).is_file() for path in tests)
        # A test that has a part of its own and is left out of another must exist by that name.
        if "-k" in each.command and tests:
            (name,) = re.findall(r"test_\w+", each.command[each.command.index("-k") + 1]) or [""]
            assert not name or f"def {name}(" in Path(tests[0]).read_text()


def test_all_parts_leave_their_figures_or_why_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real parts in their order; a script stands for Python, of which some parts fail and one crashes."""
    rows = [row("flat 256 x 4,096", ratio=0.93, median_us=1)]
    report = {**REPORT, "rows": rows}
    python = tmp_path / "python"
    python.write_text(
        f"""#!/bin/sh
        case "$*" in
            *test_bfloat16*) echo "E   AssertionError: wrong by 3"; exit 1;;
            *"not merged"*) echo "about to crash"; kill -SEGV $$;;
            *--json*) for file; do :; done; echo '{json.dumps(report)}' > $file;;
        esac
        """
    )
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setattr(shutil, "which", lambda *args, **options: None)
    path, parts = tmp_path / "light.json", first_light_parts()
    assert not run(path, parts)
    results = read(path)
    assert list(results) == [part.name for part in parts]
    failed = {"bfloat16-model": "E   AssertionError: wrong by 3", "decode-not-merged": "about to crash"}
    for name, result in results.items():
        if name in failed:
            assert (result["status"], result["last_lines"]) == ("failed", [failed[name]])
        elif name == "memory-checked-kernels":
            assert result["status"] == "skipped"
        else:
            assert result["status"] == "done"
            assert ("report" in result) == ("{json}" in result["command"])
    content = json.loads(path.read_text())
    assert [line.split(" failed")[0] for line in content["next"][:2]] == list(failed)
    assert content["next"][2:] == ["met: flat 256 x 4,096: 0.93 of what reading reaches, expected 0.9"]


def test_only_what_kernels_do_wrong_fails_the_part_that_checks_memory() -> None:
    """Calls of torch and CUDA's runtime for what a driver lacks do not."""
    (checked,) = (each for each in first_light_parts() if each.name == "memory-checked-kernels")
    options = checked.command[1 : checked.command.index(sys.executable)]
    given = dict(zip(options[::2], options[1::2], strict=True))
    assert given == {"--tool": "memcheck", "--report-api-errors": "no", "--error-exitcode": "77"}


def row(name: str, **figures: float) -> dict[str, Any]:
    return {"name": name, **figures}


def test_what_to_do_next_follows_from_the_rows() -> None:
    rows = [
        row("flat 256 x 4,096", ratio=0.93, median_us=1),
        row("256 x 4,096, 3,500 shared", ratio=0.5, median_us=250.0),
        row("256: 2,048 by all, 1,792 by 32 each, 256 private, as graphs decode", ratio=0.5, median_us=150.0),
        row("compiled: 64 x 4,096, 0 shared, step", floor_us=100.0, median_us=120.0),
        row("compiled: 64 x 4,096, 0 shared, step, GPU idle", all=0.1, between_steps=0.01),
        row("compiled: 64 x 4,096, 0 shared, answers", tokens_per_s=50.0),
        row("transformers: 64 x 4,096, 0 shared, answers", tokens_per_s=40.0),
        row("drafts: 64 x 4,096, 3,500 shared, no drafts, step", median_us=100.0),
        row("drafts: 64 x 4,096, 3,500 shared, 4 drafts each, 0% right, step", median_us=114.0),
        row("drafts: 64 x 4,096, 3,500 shared, 4 drafts each, 80% right, step", median_us=120.0),
        row("64 rows: shared: TileConfig(keys=64)", median_us=10.0),
        row("64 rows: shared: TileConfig(keys=32)", median_us=9.0),
        row("sharing: 64 tokens by 4, alone", median_us=5.0),
        row("sharing: 64 tokens by 4, together", median_us=6.0),
        row("sharing: 1,024 tokens by 4, alone", median_us=9.0),
        row("sharing: 1,024 tokens by 4, together", median_us=6.0),
        row("splitting: 1 x 4,096 in 1", median_us=9.0),
        row("splitting: 1 x 4,096 in 8", median_us=4.0),
    ]
    # A GPU that reads half of an H200's bytes per second may take twice its time.
    report = {**REPORT, "limits": {"read_bytes_per_s": 2.23e12}, "rows": rows, "failed": {"draw": "ValueError: no"}}
    assert next_steps({"attention": report, "tests": {}}) == [
        "row failed: draw: ValueError: no",
        "met: flat 256 x 4,096: 0.93 of what reading reaches, expected 0.9",
        "met: 256 x 4,096, 3,500 shared: 250 us, expected 380",
        "met: 256: 2,048 by all, 1,792 by 32 each, 256 private, as graphs decode: 150 us, expected 220",
        "MISSED: compiled: 64 x 4,096, 0 shared, step: 1.20 x what must be read, expected 1.15",
        "met: compiled: 64 x 4,096, 0 shared, step, GPU idle: 1.0% between steps, expected below 3%",
        "met: compiled: 64 x 4,096, 0 shared, answers: 50 tokens/s, transformers 40",
        "met: drafts: 64 x 4,096, 3,500 shared, 4 drafts each, 0% right, step: 1.14 x one without, expected 1.15",
        "MISSED: drafts: 64 x 4,096, 3,500 shared, 4 drafts each, 80% right, step: 1.20 x one without, expected 1.15",
        "tile_config: 64 rows: shared: TileConfig(keys=32) takes 9.0 us, TileConfig(keys=64), in use, 10.0",
        "MIN_SAVED_BYTES in triton.cost_model: sharing always pays from 3,072 tokens saved on, and not at 192",
        "MIN_PIECE_KEYS in triton.cost_model: 1 x 4,096 is fastest in 8 pieces, 4.0 us",
    ]
    other = {**REPORT, "machine": {"gpu": "Y"}}
    assert next_steps({"a": report, "b": other})[0] == "figures of different GPUs are mixed: X, Y"
