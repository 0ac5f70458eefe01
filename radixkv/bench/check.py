"""`radixkv bench check`: did a change make the bookkeeping or the planner slower than the committed figures say?

A figure in microseconds means little on another day or machine. So each is divided by a baseline of the same run: the chain
of block hashes (`hash_chain`), which does not change with RadixKV. Where a row has no such baseline of its own, looking up
32k tokens in the chain stands for how fast this processor runs such code today.

The noise of a row is the spread of its repetitions plus the spread of the committed rounds. On the processor of the
committed figures a row is worse if both its ratio and its microseconds have grown by more than that, since a ratio alone also
grows when the baseline happened to run fast. On another processor only ratios can be compared.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from radixkv.bench.cache import bookkeeping
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table, in_progress
from radixkv.bench.common.timing import Timing, frozen_garbage

RESULTS = Path(__file__).parent / "results"
REPETITIONS = 5
# Rounds of a cache row, as many as the committed figures' by default, and steps of a planner row, fewer than theirs.
ROUNDS, STEPS = 15, 40
# Changes below this are never reported: memory is laid out differently in every process. Chosen, not measured.
SMALLEST_CHANGE = 0.1
# How many median absolute deviations count as noise; 3 * 1.4826 are three standard deviations of a normal distribution.
DEVIATIONS = 3 * 1.4826
# Rows that are left out because they take seconds to set up, and the row whose chain stands for the processor's speed.
SLOW_ROWS = frozenset({"evict_1_of_100k", "evict_1_of_1m", "evict_2048_blocks_of_100k"})
YARDSTICK = "match_hit_32k"


@dataclass(frozen=True, slots=True)
class Case:
    """One row to measure again.

    Attributes:
        committed: its figure in ``results/``.
        committed_baseline: the baseline's figure, from the same file or another one of the same processor, in microseconds.
    """

    name: str
    committed: Timing
    committed_baseline: float
    measure: Callable[[], Timing]
    measure_baseline: Callable[[], Timing]


@dataclass(frozen=True, slots=True)
class Comparison:
    """A case, and what its repetitions and their baselines took in this run, in microseconds."""

    case: Case
    measured: Sequence[float]
    baselines: Sequence[float]

    @property
    def ratio(self) -> float:
        """The factor by which its cost, divided by the baseline's, has changed: 1.2 is 20 % slower."""
        return statistics.median(self._ratios) / (self.case.committed.median_us / self.case.committed_baseline)

    @property
    def time(self) -> float:
        """The factor by which its microseconds have changed."""
        return statistics.median(self.measured) / self.case.committed.median_us

    @property
    def noise(self) -> float:
        """How far two runs of the same code may differ, relative to the figure."""
        committed = self.case.committed.median_us / self.case.committed.min_us - 1
        return max(SMALLEST_CHANGE, committed + max(_deviation(self._ratios), _deviation(self.measured)))

    @property
    def _ratios(self) -> list[float]:
        return [ours / baseline for ours, baseline in zip(self.measured, self.baselines, strict=True)]

    def is_worse(self, same_processor: bool) -> bool:
        """Whether it has become slower by more than the noise."""
        change = min(self.ratio, self.time) if same_processor else self.ratio
        return change > 1 + self.noise


def _deviation(values: Sequence[float]) -> float:
    """`DEVIATIONS` median absolute deviations, relative to the median."""
    median = statistics.median(values)
    return DEVIATIONS * statistics.median(abs(value - median) for value in values) / median


def cases(results: Path) -> Iterator[Case]:
    """The rows of the fast benches that have a committed figure in the folder ``results``."""
    committed = _read(results, "cache")
    rows = {row.name: row for row in bookkeeping.rows()}
    figures = {figure["name"]: figure for figure in committed["rows"]}
    yardstick = rows[YARDSTICK].hash_chain
    assert yardstick is not None
    for name, figure in figures.items():
        row = rows.get(name)
        if row is None or name in SLOW_ROWS:
            continue
        yield Case(
            name,
            Timing(figure["median_us"], figure["min_us"]),
            figure.get("hash_chain_median_us", figures[YARDSTICK]["hash_chain_median_us"]),
            partial(row.ours, ROUNDS),
            partial(row.hash_chain or yardstick, ROUNDS),
        )
    planned = _read(results, "plan")
    # A figure of the planner has no baseline of its own, so the chain's must come from the same processor.
    if find_spec("triton") is None or planned["machine"]["cpu"] != committed["machine"]["cpu"]:
        return
    from radixkv.bench.gpu.plan import CHANGES, LEVELS, Change, Levels, measure_plan, one_torch_thread

    def measure(levels: Levels, change: Change) -> Timing:
        with one_torch_thread():
            return measure_plan(levels, change, STEPS)

    for figure in planned["rows"]:
        shared, change = figure["shared"], figure["change"]
        if shared in LEVELS and change in CHANGES:
            yield Case(
                f"plan: {shared}; {change}",
                Timing(figure["median_us"], figure["min_us"]),
                figures[YARDSTICK]["hash_chain_median_us"],
                partial(measure, LEVELS[shared], CHANGES[change]),
                partial(yardstick, ROUNDS),
            )


def compare(case: Case) -> Comparison:
    """Measure a row and its baseline in turns."""
    measured, baselines = [], []
    with frozen_garbage():
        for _ in range(REPETITIONS):
            baselines.append(case.measure_baseline().median_us)
            measured.append(case.measure().median_us)
    return Comparison(case, measured, baselines)


def run_check(console: Console, results: Path = RESULTS) -> bool:
    """Measure, print a table and what became slower; returns whether nothing did.

    Raises:
        OSError: there are no committed figures in ``results``.
    """
    found, here = _read(results, "cache")["machine"]["cpu"], describe_machine()["cpu"]
    same_processor = found == here
    comparisons = [compare(case) for case in in_progress(console, list(cases(results)), lambda case: case.name)]
    console.print(_table(comparisons, same_processor))
    if not same_processor:
        console.print(
            f"The committed figures are of another processor ({found}; this one: {here}), so only ratios to the baseline "
            "are compared. These differ between processors, too: measure the old code here before you blame the new."
        )
    worse = [comparison for comparison in comparisons if comparison.is_worse(same_processor)]
    for one in worse:
        console.print(
            f"slower {one.case.name}: {one.ratio:.2f} times the committed ratio, noise {one.noise:.0%}", style="red"
        )
    if not worse:
        console.print("nothing became slower by more than the noise")
    return not worse


def _table(comparisons: Sequence[Comparison], same_processor: bool) -> Table:
    columns = ("row", "committed, us", "now, us", "now / committed", "as a ratio to the baseline", "noise")
    table = figure_table(*columns, title=f"against the committed figures, median of {REPETITIONS} repetitions")
    for one in comparisons:
        style = "red" if one.is_worse(same_processor) else None
        table.add_row(
            one.case.name,
            f"{one.case.committed.median_us:,.1f}",
            f"{statistics.median(one.measured):,.1f}",
            f"{one.time:.2f}" if same_processor else "",
            f"{one.ratio:.2f}",
            f"{one.noise:.0%}",
            style=style,
        )
    return table


def _read(results: Path, bench: str) -> Any:
    return json.loads((results / f"{bench}.json").read_text())
