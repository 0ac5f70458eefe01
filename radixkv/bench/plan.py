"""What planning a decoding batch for the GPU costs the host, when sequences leave and others join. Needs Triton, no GPU.

All buffers lie on the CPU. Of a step in which nobody comes or goes there is no row: a kernel moves such a plan on.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.attention.device_plan import DevicePlanner
from radixkv.attention.lowering import HeadShape
from radixkv.attention.plan import QueryChunk
from radixkv.bench.machine import describe_machine
from radixkv.bench.timing import Timing, frozen_garbage

BATCH, LENGTH, BLOCK_SIZE = 256, 4096, 16
SHAPE = HeadShape(num_kv_heads=8, group=4)

# Blocks that sequences share: (groups of sequences, blocks that each group has in common), from the root on.
Levels = Sequence[tuple[int, int]]
LEVELS: dict[str, Levels] = {
    "nothing": (),
    "one prefix of 3,500 tokens": ((1, 218),),
    "three levels, 73 nodes": ((1, 96), (8, 64), (64, 48)),
}
CHANGES = (1, 16, BATCH)


@dataclass(frozen=True, slots=True)
class Row:
    """Planning one step, all work items for one shape of heads included.

    Attributes:
        shared: what the sequences share.
        changes: how many of them leave, and as many others join.
    """

    shared: str
    changes: int
    median_us: float
    min_us: float


def make_chunk(owner: int, levels: Levels, length: int) -> QueryChunk:
    """A sequence of ``length`` tokens, of which the levels' are shared with those whose ``owner % BATCH`` is near."""
    place = owner % BATCH
    nodes = [
        (1 + depth * BATCH + place * groups // BATCH) * LENGTH + np.arange(num_blocks)
        for depth, (groups, num_blocks) in enumerate(levels)
    ]
    own = (1 + len(levels) * BATCH + owner) * LENGTH
    num_own = length // BLOCK_SIZE + 1 - sum(num_blocks for _, num_blocks in levels)
    return QueryChunk(np.concatenate([*nodes, own + np.arange(num_own)]).astype(np.int32), length, 1, owner)


def make_steps(levels: Levels, changes: int, count: int) -> list[list[QueryChunk]]:
    """The batches of a run: in each, ``changes`` random sequences made room for others of the same prefix, the rest grew."""
    rng = np.random.default_rng(0)
    batch = {owner: make_chunk(owner, levels, LENGTH - int(rng.integers(100))) for owner in range(BATCH)}
    steps = [list(batch.values())]
    for _ in range(count):
        leaving = rng.choice(list(batch), changes, replace=False).tolist()
        batch = {owner: grown(chunk) for owner, chunk in batch.items() if owner not in leaving}
        for owner in leaving:
            batch[owner + BATCH] = make_chunk(owner + BATCH, levels, LENGTH - int(rng.integers(100)))
        steps.append(list(batch.values()))
    return steps


def grown(chunk: QueryChunk) -> QueryChunk:
    """The sequence one token later."""
    blocks, length = chunk.block_ids, chunk.num_context + 1
    if length == len(blocks) * BLOCK_SIZE:
        blocks = np.append(blocks, blocks[-1] + 1)
    return replace(chunk, block_ids=blocks, num_context=length)


def measure_plan(levels: Levels, changes: int, count: int) -> Timing:
    """Processor time of this thread for a step's plan and work items."""
    planner = DevicePlanner(
        max_sequences=BATCH,
        max_blocks=(LENGTH + count) // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        shape=SHAPE,
        bytes_per_token=2 * 2 * SHAPE.num_kv_heads * 128,
        element_bytes=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        multiprocessors=132,
    )
    times = []
    with frozen_garbage():
        for chunks in make_steps(levels, changes, count):
            start = time.thread_time_ns()
            plan = planner.plan(chunks)
            if plan.splits(SHAPE) is None:
                plan.items(SHAPE)
            times.append((time.thread_time_ns() - start) / 1e3)
    return Timing(statistics.median(times[1:]), min(times[1:]))


def run_plan(console: Console, steps: int, json_path: Path | None) -> None:
    """Measure ``steps`` steps of every kind, print a table, and write the rows."""
    rows = []
    num_threads = torch.get_num_threads()
    # What a GPU would do, torch does here; more threads would have this one wait for them.
    torch.set_num_threads(1)
    try:
        with console.status("planning"):
            for shared, levels in LEVELS.items():
                for changes in CHANGES:
                    timing = measure_plan(levels, changes, steps)
                    rows.append(Row(shared, changes, timing.median_us, timing.min_us))
    finally:
        torch.set_num_threads(num_threads)
    table = Table("256 sequences share", *(f"{changes} leave and join, us" for changes in CHANGES))
    for shared in LEVELS:
        table.add_row(shared, *(f"{row.median_us:,.0f}" for row in rows if row.shared == shared))
    console.print(table)
    if json_path:
        content = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(content, indent=2) + "\n")
