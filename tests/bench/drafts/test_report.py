"""Figures of drafts in the terminal and as a plot."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from radixkv.bench.drafts.report import Row, plot, table


def row(name: str, wanted: float | None) -> Row:
    return Row(name, wanted, [100.0], [120.0], [50.0], [60.0], {}, 64, 0.0, {}, [])


def test_work_of_which_no_gain_is_expected_has_no_figure_to_miss(tmp_path: Path) -> None:
    """A text under a penalty, which cannot be copied, used to count among the rows that miss their target."""
    rows = [row("copied", 2.5), row("under a penalty", None)]
    console = Console(file=(tmp_path / "out.txt").open("w+"), width=200, force_terminal=True, color_system="standard")
    console.print(table(rows))
    console.file.seek(0)
    copied, penalized = (line for line in console.file.read().splitlines() if "120.0" in line)
    red = "\x1b[31m"
    assert "2.50" in copied
    assert red in copied
    assert red not in penalized
    plot(rows, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
