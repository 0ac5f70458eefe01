"""What tiers below the pool gain and cost, on a real model: against no tier, and hot against cold, in the same run.

Five questions:

- how fast the first token is after a restart;
- how fast a working set four times the pool is served, which is recomputed again and again where there is no tier, and how
  far that is from a pool that holds all of it, which no tier can beat;
- how late first tokens are for users who arrive at random times;
- what writing costs prompts that are never repeated;
- how fast the first token is of a prompt that another engine has put into a shared store.
"""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.tiers.first_tokens import MORE_ROUNDS, Restart, measure_restart, measure_shared
from radixkv.bench.tiers.working_set import LOAD, MeasuredArrivals, WorkingSet, measure_arrivals, measure_working_set
from radixkv.bench.tiers.writing import UNRELATED_PROMPTS, measure_writing


def run_tiers(
    console: Console,
    model: str | None,
    *,
    conversations: int,
    turns: int,
    rounds: int,
    shared_cache: str | None,
    json_path: Path | None,
    plot_path: Path | None,
) -> None:
    """Measure, print tables, and write the figures.

    Args:
        console: for the tables.
        model: as for `LLM`.
        conversations: in the working set.
        turns: of each.
        rounds: of what is repeated.
        shared_cache: a store to be measured, as for `LLM`; None: none is.
        json_path: for the figures.
        plot_path: for a drawing.
    """
    shared = None
    if shared_cache is not None:  # first: a store that cannot be opened is then refused before the others take minutes
        with console.status("a shared store"), _new_folder() as folder:
            shared = measure_shared(model, shared_cache, Path(folder), MORE_ROUNDS * rounds)
        os.sync()  # otherwise the system would write what was left in the store during the next measurement
    with console.status("after a restart"), _new_folder() as folder:
        restarts = measure_restart(model, Path(folder), rounds)
    sets = []
    for tier in ("none", "host", "disk", "larger pool"):
        with console.status("a working set four times the pool"), _new_folder() as folder:
            sets.append(measure_working_set(model, tier, Path(folder), conversations, turns))
    with console.status("conversations at random times"), _new_folder() as folder:
        rate = LOAD * sets[0].requests_per_second
        arrivals = measure_arrivals(model, rate, Path(folder), conversations, turns)
    with console.status("what writing costs"), _new_folder() as folder:
        writing = measure_writing(model, Path(folder), MORE_ROUNDS * rounds)
    figures = {
        "machine": describe_machine("torch", "transformers"),
        "restart": [asdict(each) for each in restarts],
        "working_set": {"conversations": conversations, "turns": turns, "rows": [asdict(each) for each in sets]},
        "arrivals": [asdict(each) for each in arrivals],
        "writing": asdict(writing),
        **({} if shared is None else {"shared": asdict(shared)}),
    }
    write_figures(json_path, figures)
    if plot_path is not None:
        plot_tiers(restarts, sets, plot_path)
    for table in (_restart_table(restarts), _working_set_table(sets), _arrivals_table(arrivals)):
        console.print(table)
    console.print(
        f"{UNRELATED_PROMPTS} unrelated prompts: {writing.without_tiers:.1f} tokens/s without tiers, "
        f"{writing.write_back_ratio - 1:+.1%} with write-back, {writing.write_through_ratio - 1:+.1%} with write-through"
    )
    if shared is not None:
        console.print(
            f"{shared.prompt_tokens} tokens, {shared.cached_tokens} of them from the shared store: {shared.loaded:.3f} s, "
            f"{shared.loaded / shared.cold:.3f} of {shared.cold:.3f} s cold"
        )


def _new_folder() -> tempfile.TemporaryDirectory[str]:
    """One for each measurement: the page cache that the files of one take would have to be reclaimed during the next."""
    return tempfile.TemporaryDirectory(prefix="radixkv-tiers-")


def plot_tiers(restarts: list[Restart], sets: list[WorkingSet], path: Path) -> None:
    """Draw the first tokens after a restart, and the working set's throughput."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    names = ["hot", "loaded", "cold"]
    for index, restart in enumerate(restarts):
        heights = [restart.hot, restart.loaded, restart.cold]
        label = f"{restart.prompt_tokens} tokens, {restart.question_tokens} new"
        bars = left.bar(np.arange(3) + 0.27 * index, heights, 0.24, label=label)
        left.bar_label(bars, fmt="%.2f")
    left.set_xticks(np.arange(3) + 0.27, names)
    left.set_yscale("log")
    left.set_ylabel("seconds to the first token")
    left.set_title("After a restart, from the disk")
    left.legend()
    bars = right.bar([each.tier for each in sets], [each.tokens_per_second for each in sets])
    right.bar_label(bars, fmt="%.0f")
    right.set_ylabel("tokens a second")
    right.set_title("Working set four times the pool, by what is below it")
    figure.savefig(path)


def _restart_table(restarts: list[Restart]) -> Table:
    columns = ("prompt", "hot, s", "loaded after a restart, s", "cold, s", "cold without tiers, s")
    table = figure_table(*columns, "loaded / hot", "loaded / cold")
    for each in restarts:
        table.add_row(
            f"{each.prompt_tokens}, {each.cached_tokens} of it loaded, and {each.question_tokens} new",
            f"{each.hot:.3f}",
            f"{each.loaded:.3f}",
            f"{each.cold:.3f}",
            f"{each.cold_without_tiers:.3f}",
            f"{each.loaded / each.hot:.2f}",
            f"{each.loaded / each.cold:.3f}",
        )
    return table


def _working_set_table(sets: list[WorkingSet]) -> Table:
    table = figure_table("below the pool", "tokens/s", "against none", "cached", "first token p50, s", "p99, s")
    for row in sets:
        table.add_row(
            row.tier,
            f"{row.tokens_per_second:.0f}",
            f"{row.tokens_per_second / sets[0].tokens_per_second:.2f}",
            f"{row.cached_share:.0%}",
            f"{row.ttft_p50:.2f}",
            f"{row.ttft_p99:.2f}",
        )
    return table


def _arrivals_table(arrivals: list[MeasuredArrivals]) -> Table:
    table = figure_table("below the pool", "requests/s", "cached", "first token p50, s", "p99, s", "p99 / p50 of none")
    for users in arrivals:
        table.add_row(
            users.tier,
            f"{users.requests_per_second:.2f}",
            f"{users.cached_share:.0%}",
            f"{users.ttft_p50:.2f}",
            f"{users.ttft_p99:.2f}",
            f"{users.ttft_p99 / arrivals[0].ttft_p50:.2f}",
        )
    return table
