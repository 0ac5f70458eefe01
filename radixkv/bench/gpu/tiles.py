"""Which tile configuration is fastest on a GPU, and from which sizes on sharing and splitting pay.

The constants of `radixkv_kernels.tile_config` and of attention's `triton.cost_model` come from here. The tables are: batches
that share a prefix, computed alone and together, around the point where sharing begins to pay; tiles of one class and of
several; small batches cut into more and more pieces; and configurations of every tile class on work of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.attention import QueryBatch
from radixkv.bench.common.tables import figure_table
from radixkv.bench.gpu.layer import (
    DIM,
    HEADS,
    KV_HEADS,
    TOKEN_BYTES,
    Level,
    layer_work,
    make_pool,
    max_tokens,
    tree_batch,
)
from radixkv.bench.gpu.report import GpuReport, UnavailableError
from radixkv.bench.gpu.timing import median_seconds
from radixkv.memory import KVPool

# Triton is installed only where there is a GPU.
if TYPE_CHECKING:
    from radixkv.attention.triton import TritonAttention
    from radixkv_kernels import TileConfig

GROUP = HEADS // KV_HEADS
SCALE = DIM**-0.5
KEYS, WARPS, STAGES = (32, 64, 128), (2, 4, 8), (2, 3, 4)
SHARED_BY, SHARED_TOKENS = (4, 16, 64, 256), (64, 256, 1024, 4096)
SPLIT_BATCHES, SPLITS, SPLIT_LENGTH = (1, 8, 32), (1, 2, 4, 8, 16, 32), 4096
# Prefix trees of 256 sequences.
SHARED_TREES = MappingProxyType(
    {
        "tile classes: 3,488 by all, 608 private": [Level(1, 3488), Level(256, 608)],
        "tile classes: 2,048 by all, 1,792 by 32 each, 256 private": [Level(1, 2048), Level(8, 1792), Level(256, 256)],
    }
)


Work = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Timed:
    """How long a piece of work took."""

    median_us: float


def _timed(work: Work) -> Timed:
    return Timed(median_seconds(work) * 1e6)


@dataclass(slots=True)
class Problem:
    """A batch's tensors, as kernels take them.

    Attributes:
        query: ``[rows, heads, dim]``.
        output: ``[rows, heads, dim]``.
        tables: int32 ``[sequences, blocks]``.
        positions: int32 ``[rows]``.
    """

    pool: KVPool
    query: torch.Tensor
    output: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor

    @classmethod
    def of(cls, batch: int, levels: list[Level], num_new: int, dtype: torch.dtype, device: str) -> Problem:
        """Random numbers in the shape of `tree_batch`."""
        tree, num_blocks, _ = tree_batch(batch, levels, num_new)
        positions = (tree.num_context[:, None] + np.arange(num_new)).reshape(-1)
        query = torch.randn(batch * num_new, HEADS, DIM, dtype=dtype, device=device)
        return cls(
            make_pool(num_blocks, dtype, device),
            query,
            torch.empty_like(query),
            torch.from_numpy(np.stack([table.block_ids for table in tree.tables])).to(device),
            torch.from_numpy(positions.astype(np.int32)).to(device),
        )

    def partial_results(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for so many partial results."""
        device = self.query.device
        return torch.empty(count, HEADS, DIM, device=device), torch.empty(count, HEADS, device=device)


def flat_work(problem: Problem, num_splits: int = 1, config: TileConfig | None = None) -> Work:
    """Attend each row alone over all its keys, in ``num_splits`` parts, and merge the parts."""
    from radixkv_kernels import attend_split, merge_splits

    rows = len(problem.query)
    row_tables = torch.arange(rows, dtype=torch.int32, device=problem.query.device)
    partials = problem.partial_results(rows * num_splits)

    def work() -> None:
        attend_split(
            problem.query, problem.pool.keys[0], problem.pool.values[0], problem.tables, row_tables, problem.positions,
            problem.output, *partials, num_splits=num_splits, scale=SCALE, config=config,
        )  # fmt: skip
        if num_splits > 1:
            merge_splits(*partials, problem.output, num_splits=num_splits)

    return work


def item_work(problem: Problem, items: list[list[int]], tile_rows: int, config: TileConfig | None = None) -> Work:
    """Attend work items of one tile class, without merging their results."""
    from radixkv_kernels import attend_items

    there = torch.tensor(items, dtype=torch.int32, device=problem.query.device)
    partials = problem.partial_results(sum(item[1] for item in items))
    return lambda: attend_items(
        problem.query, problem.pool.keys[0], problem.pool.values[0], problem.tables, problem.positions, there,
        problem.output, *partials, tile_rows=tile_rows, scale=SCALE, config=config,
    )  # fmt: skip


def node_items(num_rows: int, num_keys: int, tile_rows: int, programs: int) -> list[list[int]]:
    """Items over a node that all rows share, cut into as many pieces as make about ``programs`` programs."""
    tile = tile_rows // GROUP
    tiles = -(-num_rows // tile)
    pieces = max(1, round(programs / (tiles * KV_HEADS)))
    length = -(-num_keys // (16 * pieces)) * 16
    items: list[list[int]] = []
    for start in range(0, num_keys, length):
        for row in range(0, num_rows, tile):
            count, written = min(tile, num_rows - row), sum(item[1] for item in items)
            items.append([row, count, 0, start, min(start + length, num_keys), written])
    return items


def row_items(problem: Problem, tile_rows: int) -> list[list[int]]:
    """Items of neighbouring rows of one sequence over all their keys, nothing shared or cut."""
    from radixkv_kernels import NO_PARTIAL, OPEN_END

    num_new = len(problem.query) // len(problem.tables)
    tile = min(tile_rows // GROUP, num_new)
    return [
        [sequence * num_new + row, min(tile, num_new - row), sequence, 0, OPEN_END, NO_PARTIAL]
        for row in range(0, num_new, tile)
        for sequence in range(len(problem.tables))
    ]


def _by_tile_class() -> Iterator[tuple[str, int, Callable[[], Callable[..., Work]]]]:
    """Kinds of work, their tile rows, and what prepares them: a function that makes the work itself for a configuration."""
    dtype, device = torch.bfloat16, "cuda"

    def flat() -> Callable[..., Work]:
        return partial(flat_work, Problem.of(256, [Level(256, 4096)], 1, dtype, device))

    def tails() -> Callable[..., Work]:
        problem = Problem.of(256, [Level(256, 608)], 1, dtype, device)
        return partial(item_work, problem, row_items(problem, 16), 16)

    def node(tile_rows: int) -> Callable[..., Work]:
        programs = torch.cuda.get_device_properties(device).multi_processor_count * 128 // tile_rows
        problem = Problem.of(256, [Level(1, 3488)], 1, dtype, device)
        return partial(item_work, problem, node_items(256, 3488, tile_rows, programs), tile_rows)

    def prompts(tile_rows: int) -> Callable[..., Work]:
        problem = Problem.of(4, [Level(4, 6144)], 2048, dtype, device)
        return partial(item_work, problem, row_items(problem, tile_rows), tile_rows)

    yield "16 rows: flat 256 x 4,096", 16, flat
    yield "16 rows: 256 tails of 608", 16, tails
    for tile_rows in (64, 128):
        yield f"{tile_rows} rows: 3,488 shared by 256", tile_rows, partial(node, tile_rows)
        yield f"{tile_rows} rows: 4 prompts of 2,048 over 6,144", tile_rows, partial(prompts, tile_rows)


def _tile_tables(report: GpuReport) -> Iterator[Table]:
    for name, tile_rows, prepare in _by_tile_class():
        configs = {f"{name}: {config}": config for config in candidates(tile_rows)}
        if not any(map(report.wants, configs)):
            continue
        make = prepare()
        times: dict[TileConfig, float] = {}
        for row_name, config in configs.items():
            row = report.measure(row_name, partial(_configured, make, config))
            if row is not None:
                times[config] = row.median_us
        table = figure_table("keys", "warps", "stages", "median us", title=name)
        for config, median_us in sorted(times.items(), key=lambda item: item[1]):
            table.add_row(*map(str, config), f"{median_us:.1f}")
        yield table


def candidates(tile_rows: int) -> list[TileConfig]:
    """The one in use and its neighbours: other keys and stages with its warps, and other warps. Each compiles for seconds."""
    from radixkv_kernels import TileConfig, tile_config

    used = tile_config(tile_rows, DIM, DIM, torch.bfloat16, torch.bfloat16)
    others = [TileConfig(keys, used.warps, stages) for keys in KEYS for stages in STAGES]
    return list(dict.fromkeys([used, *others, *(used._replace(warps=warps) for warps in WARPS)]))


def _configured(make: Callable[..., Work], config: TileConfig) -> Timed:
    from triton.runtime.errors import OutOfResources

    try:
        return _timed(make(config=config))
    except OutOfResources as error:
        raise UnavailableError(str(error)) from error


def _sharing_table(report: GpuReport) -> Table:
    table = figure_table("sharing", "MB saved", "alone us", "together us")
    for count in SHARED_BY:
        for tokens in SHARED_TOKENS:
            name = f"sharing: {tokens:,} tokens by {count}"
            alone = report.measure(f"{name}, alone", partial(_sharing, count, tokens, shared=False))
            shared = report.measure(f"{name}, together", partial(_sharing, count, tokens, shared=True))
            if alone is not None and shared is not None:
                saved = (count - 1) * tokens * TOKEN_BYTES / 1e6
                table.add_row(name, f"{saved:,.1f}", f"{alone.median_us:.1f}", f"{shared.median_us:.1f}")
    return table


def _sharing(count: int, tokens: int, shared: bool) -> Timed:
    batch, num_blocks, _ = tree_batch(count, [Level(1, tokens), Level(count, 256)], 1)
    return _timed(layer_work(planned(batch, make_pool(num_blocks, torch.bfloat16, "cuda"), shared), count))


def planned(batch: QueryBatch, pool: KVPool, shared: bool) -> TritonAttention:
    """A decoding batch, planned as if any sharing paid (``shared``), or none."""
    from radixkv.attention.triton import TritonBackend
    from radixkv.attention.triton.cost_model import sharing_rule

    rule = sharing_rule(GROUP, pool.dtype, pool.dtype, TOKEN_BYTES)
    rule = replace(rule, min_saved_tokens=1 if shared else 2**40)
    size = len(batch.tables), max_tokens(batch)
    return TritonBackend(pool, pool.dtype, HEADS, *size, sharing=rule).prepare(batch)


def _tile_classes_table(report: GpuReport) -> Table:
    table = figure_table("tile classes", "several in turn us", "one us")
    for name, levels in SHARED_TREES.items():
        rows = [
            report.measure(f"{name}, {how}", partial(_placed, levels, one_class))
            for how, one_class in (("several in turn", False), ("one", True))
        ]
        table.add_row(name, *("" if row is None else f"{row.median_us:.1f}" for row in rows))
    return table


def _placed(levels: list[Level], one_class: bool) -> Timed:
    batch, num_blocks, _ = tree_batch(256, levels, 1)
    attention = planned(batch, make_pool(num_blocks, torch.bfloat16, "cuda"), shared=True)
    attention.tiling = replace(attention.tiling, one_class=one_class)
    return _timed(layer_work(attention, 256))


def _splitting_table(report: GpuReport) -> Table:
    table = figure_table("splitting", *(f"{SPLIT_LENGTH // splits:,} keys" for splits in SPLITS))
    for batch in SPLIT_BATCHES:
        name = f"splitting: {batch} x {SPLIT_LENGTH:,}"
        cells = []
        for splits in SPLITS:
            row = report.measure(f"{name} in {splits}", partial(_splitting, batch, splits))
            cells.append("" if row is None else f"{row.median_us:.1f}")
        table.add_row(name, *cells)
    return table


def _splitting(batch: int, splits: int) -> Timed:
    problem = Problem.of(batch, [Level(batch, SPLIT_LENGTH - 1)], 1, torch.bfloat16, "cuda")
    return _timed(flat_work(problem, splits))


def run_tiles(console: Console, json_path: Path | None, only: str | None = None, resume: bool = False) -> bool:
    """Measure, print the tables, and write the rows.

    A configuration that does not fit the GPU is noted as unavailable, and a row that fails as failed; the others are measured
    all the same.

    Args:
        only: rows whose name contains this.
        resume: keep the rows that are in the file, and measure the others.

    Returns:
        Whether no row failed.

    Raises:
        ValueError: there is no GPU, or no row's name contains ``only``.
    """
    report = GpuReport.begin(console, json_path, only, resume)
    tables = _sharing_table(report), _tile_classes_table(report), _splitting_table(report)
    return report.end(*tables, *_tile_tables(report))
