"""The figures of drafts as a table and as a plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from radixkv.bench.common.tables import figure_table
from radixkv.bench.drafts.equality import Difference
from radixkv.outputs import DraftCounts


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of work.

    Attributes:
        wanted: the least acceptable speed-up over the same work without drafts; None: no gain is expected.
        without, with_drafts: tokens a second, round by round.
        cpu_without, cpu_with_drafts: the same per second of processor time, in which other programs do not count.
        peers: others' tokens a second, by name.
        tokens: how many were compared, over all rounds.
        repeated_share: share of the tokens that are inside of repeats.
        drafts: counts by source.
        differences: between answers with drafts and without.
    """

    name: str
    wanted: float | None
    without: list[float]
    with_drafts: list[float]
    cpu_without: list[float]
    cpu_with_drafts: list[float]
    peers: dict[str, float]
    tokens: int
    repeated_share: float
    drafts: dict[str, DraftCounts]
    differences: list[Difference]

    @property
    def ratio(self) -> float:
        """Speed-up by drafts, the median of the rounds."""
        return statistics.median(b / a for a, b in zip(self.without, self.with_drafts, strict=True))

    @property
    def cpu_ratio(self) -> float:
        """The same by processor time."""
        return statistics.median(b / a for a, b in zip(self.cpu_without, self.cpu_with_drafts, strict=True))


def table(rows: Sequence[Row]) -> Table:
    """All rows, for a terminal."""
    peers = list(dict.fromkeys(name for row in rows for name in row.peers))
    columns = (
        "work",
        "without",
        "with drafts",
        "times",
        "by CPU time",
        "wanted",
        *peers,
        "in repeats",
        "accepted",
        "differ",
    )
    shown = figure_table(*columns, title="tokens a second")
    for row in rows:
        drafted = sum(counts.drafted for counts in row.drafts.values())
        accepted = sum(counts.accepted for counts in row.drafts.values())
        style = "red" if row.wanted is not None and row.ratio < row.wanted else "green"
        shown.add_row(
            row.name,
            f"{statistics.median(row.without):.1f}",
            f"{statistics.median(row.with_drafts):.1f}",
            Text(f"{row.ratio:.2f}", style),
            f"{row.cpu_ratio:.2f}",
            "" if row.wanted is None else f"{row.wanted:.2f}",
            *(f"{row.peers[name]:.1f}" if name in row.peers else "" for name in peers),
            f"{row.repeated_share:.0%}",
            f"{accepted} of {drafted}",
            f"{len(row.differences)} in {row.tokens:,}",
        )
    return shown


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a bar per row, with a mark where it should end, into an image file."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 0.45 * len(rows) + 1.2), layout="constrained")
    axes = figure.subplots()
    positions = range(len(rows))
    axes.barh(positions, [row.ratio for row in rows], color="#00897b", label="with drafts")
    wanted = [math.nan if row.wanted is None else row.wanted for row in rows]
    axes.plot(wanted, positions, "k|", markersize=14, label="wanted")
    axes.axvline(1.0, color="grey", linewidth=0.8)
    axes.set_yticks(positions, [row.name for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel("times the tokens a second without drafts")
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
