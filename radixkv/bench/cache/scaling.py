"""`radixkv bench cache-scaling`: how the cache's costs grow, in ordinary trees and in the worst ones.

Every curve is one call timed at several sizes. A straight line on the plot's double logarithmic axes is a power of the
size, whose exponent is in the table: 0 is constant, 1 is linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from radixkv.bench.cache.bookkeeping import (
    BLOCK_SIZE,
    Tokens,
    cache_of_leaves,
    compute,
    filled_cache,
    insert_cold,
    random_tokens,
)
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table, in_progress
from radixkv.bench.common.timing import Timing, frozen_garbage, measure, measure_call
from radixkv.cache import BlockTable, PrefixCache

_LENGTHS = tuple(1 << n for n in range(10, 19))
_LEAVES = (1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_DEPTHS = (1, 10, 100, 1_000, 10_000)
_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Curve:
    """``call`` timed at each of ``sizes``; ``panel`` names what grows, and so the plot that it belongs to."""

    name: str
    panel: str
    sizes: Sequence[int]
    call: Callable[[int], Timing]


def curves() -> list[Curve]:
    """Everything that is plotted."""
    return [
        Curve("match, all known", "tokens of the prompt", _LENGTHS, match_length),
        Curve("insert, nothing known", "tokens of the prompt", _LENGTHS, partial(insert_cold, rounds=_ROUNDS)),
        Curve("open and abort, all known", "tokens of the prompt", _LENGTHS, open_length),
        Curve("evict one leaf", "leaves of the tree", _LEAVES, partial(among_leaves, evict_one)),
        Curve("insert a leaf", "leaves of the tree", _LEAVES, partial(among_leaves, insert_one)),
        Curve("match a leaf", "leaves of the tree", _LEAVES, partial(among_leaves, match_one)),
        Curve(
            "match, parting inside a block",
            "children of one node that begin alike",
            _LEAVES,
            partial(among_leaves, part_inside),
        ),
        Curve(
            "match down the tree", "nodes on the path (10,000 blocks in all)", _DEPTHS, partial(in_depth, match_deep)
        ),
        Curve(
            "open and abort down the tree",
            "nodes on the path (10,000 blocks in all)",
            _DEPTHS,
            partial(in_depth, open_and_abort),
        ),
        Curve(
            "match, parting there",
            "token of the block at which the prompt parts",
            list(range(1, BLOCK_SIZE + 1)),
            part_at,
        ),
    ]


def match_length(num_tokens: int) -> Timing:
    cache, tokens = filled_cache(num_tokens)
    return measure_call(partial(cache.match, tokens), rounds=_ROUNDS, calls=8)


def open_length(num_tokens: int) -> Timing:
    cache, tokens = filled_cache(num_tokens)
    return open_and_abort(cache, tokens)


def open_and_abort(cache: PrefixCache, tokens: Tokens) -> Timing:
    def call() -> None:
        cache.abort(cache.open(tokens))
        cache.drain_copies()

    return measure_call(call, rounds=_ROUNDS)


def among_leaves(call: Callable[[PrefixCache, int], Timing], num_leaves: int) -> Timing:
    """One node with ``num_leaves`` children, each a block, that differ in their last token only."""
    return call(cache_of_leaves(num_leaves, spare_blocks=0 if call is evict_one else 1000), num_leaves)


def evict_one(cache: PrefixCache, num_leaves: int) -> Timing:
    table = cache.open([1], write=False)
    return measure_call(lambda: cache.reserve(table, (table.num_blocks + 1) * BLOCK_SIZE), rounds=4 * _ROUNDS)


def insert_one(cache: PrefixCache, num_leaves: int) -> Timing:
    new_tokens = iter(range(num_leaves, num_leaves + 1000))

    def reserved() -> tuple[BlockTable, Tokens]:
        prompt = np.full(BLOCK_SIZE, 7, dtype=np.int32)
        prompt[-1] = next(new_tokens)
        table = cache.open(prompt, read=False)
        cache.reserve(table, BLOCK_SIZE)
        return table, prompt

    return measure(reserved, lambda state: cache.append(*state), rounds=4 * _ROUNDS)


def match_one(cache: PrefixCache, num_leaves: int) -> Timing:
    prompt = np.full(BLOCK_SIZE, 7, dtype=np.int32)
    prompt[-1] = num_leaves // 2
    return measure_call(partial(cache.match, prompt), rounds=_ROUNDS, calls=8)


def part_inside(cache: PrefixCache, num_leaves: int) -> Timing:
    prompt = np.full(BLOCK_SIZE, 7, dtype=np.int32)
    prompt[-1] = num_leaves + 1
    assert cache.match(prompt) == BLOCK_SIZE - 1
    return measure_call(partial(cache.match, prompt), rounds=_ROUNDS, calls=8)


def in_depth(call: Callable[[PrefixCache, Tokens], Timing], num_nodes: int) -> Timing:
    """A path of 10,000 blocks that other prompts have cut into ``num_nodes`` nodes."""
    num_blocks = 10_000
    cache, tokens = filled_cache(num_blocks * BLOCK_SIZE, spare_blocks=2 * num_nodes + 10)
    # From the deep end up, so that each prompt splits the first node of the path.
    for node in range(num_nodes - 1, 0, -1):
        stem = tokens[: node * num_blocks // num_nodes * BLOCK_SIZE]
        cache.close(compute(cache, np.concatenate([stem, random_tokens(BLOCK_SIZE, seed=node)])))
    return call(cache, tokens)


def match_deep(cache: PrefixCache, tokens: Tokens) -> Timing:
    return measure_call(partial(cache.match, tokens), rounds=_ROUNDS)


def part_at(position: int) -> Timing:
    """`match` of a prompt of 4k tokens that first differs from a cached one at this token of its last block."""
    cache, tokens = filled_cache(4 << 10)
    prompt = tokens.copy()
    prompt[len(prompt) - BLOCK_SIZE + position - 1] += 1
    assert cache.match(prompt) == len(prompt) - BLOCK_SIZE + position - 1
    return measure_call(partial(cache.match, prompt), rounds=_ROUNDS, calls=8)


def exponent(sizes: Sequence[int], microseconds: Sequence[float]) -> float:
    """The exponent of the power of the size by which a cost grows, fitted to the upper half of the sizes."""
    middle = len(sizes) // 2
    x, y = np.log(sizes[middle:]), np.log(microseconds[middle:])
    return float(np.polyfit(x, y, 1)[0])


def run_scaling(console: Console, json_path: Path | None, plot_path: Path | None) -> None:
    """Measure every curve, print the table, write JSON, draw the plot."""
    results: list[tuple[Curve, list[float]]] = []
    for curve in in_progress(console, curves(), lambda curve: f"{curve.name} by {curve.panel}"):
        medians = []
        for size in curve.sizes:
            with frozen_garbage():
                medians.append(curve.call(size).median_us)
        results.append((curve, medians))
    table = figure_table("call", "by", "at", "takes", "exponent", title="microseconds per call", num_labels=2)
    for curve, medians in results:
        sizes = f"{curve.sizes[0]:,} ... {curve.sizes[-1]:,}"
        takes = f"{medians[0]:,.1f} ... {medians[-1]:,.1f}"
        table.add_row(curve.name, curve.panel, sizes, takes, f"{exponent(curve.sizes, medians):.2f}")
    console.print(table)
    figures = [
        {
            "call": curve.name,
            "by": curve.panel,
            "sizes": list(curve.sizes),
            "median_us": medians,
            "exponent": exponent(curve.sizes, medians),
        }
        for curve, medians in results
    ]
    document = {"machine": describe_machine("numpy", "sortedcontainers"), "curves": figures}
    write_figures(json_path, document)
    if plot_path is not None:
        _plot(results, plot_path)


def _plot(results: Sequence[tuple[Curve, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    panels = list(dict.fromkeys(curve.panel for curve, _ in results))
    columns = 3
    figure = Figure(figsize=(5 * columns, 4 * math.ceil(len(panels) / columns)), layout="constrained")
    axes = figure.subplots(math.ceil(len(panels) / columns), columns, squeeze=False).flat
    for axis, panel in zip(axes, panels, strict=False):
        for curve, medians in results:
            if curve.panel == panel:
                axis.plot(curve.sizes, medians, marker="o", label=curve.name)
        axis.set(xscale="log", yscale="log", xlabel=panel, ylabel="microseconds", ylim=(1, None))
        axis.grid(alpha=0.3, which="both")
        axis.legend()
    for axis in list(figure.axes)[len(panels) :]:
        axis.remove()
    figure.savefig(path, dpi=110)
