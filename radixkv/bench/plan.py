"""What planning a decoding batch for the GPU costs the host, when sequences leave and others join. Needs Triton, no GPU.

From the chunks to all that a CUDA graph reads, in its buffers, which here lie on the CPU. Of a step in which nobody comes or
goes there is no row: a kernel moves such a plan on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from radixkv.attention.device_plan import DevicePlanner
from radixkv.attention.lowering import HeadShape
from radixkv.attention.padded_decode import PaddedDecode
from radixkv.attention.plan import QueryChunk
from radixkv.attention.triton_backend import PartialResults
from radixkv.bench.machine import describe_machine
from radixkv.bench.timing import Timing, frozen_garbage
from radixkv.memory import KVPool, LayerShape

BATCH, LENGTH, BLOCK_SIZE = 256, 4096, 16
ROUNDS = 7
SHAPE = HeadShape(num_kv_heads=8, group=4)
CPU = torch.device("cpu")

# Blocks that sequences share: (groups of sequences, blocks that each group has in common), from the root on.
Levels = Sequence[tuple[int, int]]
LEVELS: dict[str, Levels] = {
    "nothing": (),
    "one prefix of 3,500 tokens": ((1, 218),),
    "three levels, 73 nodes": ((1, 96), (8, 64), (64, 48)),
}


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to a batch from one step to the next.

    Attributes:
        count: sequences that leave, and others that join.
        elsewhere: those who join share the prefix of any others; otherwise that of those who left, so that the tree of
            prefixes stays as it is.
    """

    count: int
    elsewhere: bool = False


CHANGES: dict[str, Change] = {
    "1 joins where 1 left": Change(1),
    "1 joins elsewhere": Change(1, elsewhere=True),
    "16 join where 16 left": Change(16),
    "all 256 are new": Change(BATCH),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Planning one step, all work items for one shape of heads included.

    Attributes:
        shared: what the sequences share.
        change: who leaves and who joins.
    """

    shared: str
    change: str
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


def make_steps(levels: Levels, change: Change, count: int) -> list[list[QueryChunk]]:
    """The batches of a run: in each, random sequences made room for others, and the rest grew."""
    rng = np.random.default_rng(0)
    batch = {owner: make_chunk(owner, levels, LENGTH - int(rng.integers(100))) for owner in range(BATCH)}
    steps = [list(batch.values())]
    for step in range(1, count + 1):
        leaving = rng.choice(list(batch), change.count, replace=False)
        places = rng.choice(BATCH, change.count, replace=False) if change.elsewhere else leaving % BATCH
        batch = {owner: grown(chunk) for owner, chunk in batch.items() if owner not in leaving}
        for owner in (step * BATCH + places).tolist():
            batch[owner] = make_chunk(owner, levels, LENGTH - int(rng.integers(100)))
        steps.append(list(batch.values()))
    return steps


def grown(chunk: QueryChunk) -> QueryChunk:
    """The sequence one token later."""
    blocks, length = chunk.block_ids, chunk.num_context + 1
    if length == len(blocks) * BLOCK_SIZE:
        blocks = np.append(blocks, blocks[-1] + 1)
    return replace(chunk, block_ids=blocks, num_context=length)


def measure_plan(levels: Levels, change: Change, count: int) -> Timing:
    """Processor time of this thread from a step's chunks to its plan in a graph's buffers.

    All steps are planned in several rounds, and of each the fastest counts: whoever else works on the machine takes a part
    of the processor's caches.
    """
    steps = make_steps(levels, change, count)
    times = np.min([_plan_all(steps, count) for _ in range(ROUNDS)], axis=0)
    return Timing(float(np.median(times)), float(times.min()))


def _plan_all(steps: Sequence[list[QueryChunk]], count: int) -> list[float]:
    """Microseconds for each step but the first."""
    planner = DevicePlanner(
        max_sequences=BATCH,
        max_blocks=(LENGTH + count) // BLOCK_SIZE + 1,
        block_size=BLOCK_SIZE,
        shape=SHAPE,
        bytes_per_token=2 * 2 * SHAPE.num_kv_heads * 128,
        element_bytes=2,
        dtype=torch.bfloat16,
        device=CPU,
        multiprocessors=132,
    )
    pool = KVPool([LayerShape(SHAPE.num_kv_heads, 128, 128)], 1, BLOCK_SIZE, torch.bfloat16)
    first, *others = steps
    plan = planner.plan(first)
    padded = PaddedDecode(BATCH, pool, plan.buffers, plan.is_flat, PartialResults(CPU))
    padded.load(plan)
    padded.make_room(SHAPE)
    times = []
    with frozen_garbage():
        for batch in others:
            # Just made, as an engine's are, and their tables views.
            chunks = [replace(chunk, block_ids=chunk.block_ids[:]) for chunk in batch]
            start = time.thread_time_ns()
            loaded = padded.load(planner.plan(chunks))
            times.append((time.thread_time_ns() - start) / 1e3)
            assert loaded, "a graph has room for any batch of its size"
    return times


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """What a GPU would do, torch does here; more threads would have the measured one wait for them."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def run_plan(console: Console, steps: int, json_path: Path | None) -> None:
    """Measure ``steps`` steps of every kind, print a table, and write the rows."""
    rows = []
    with one_torch_thread(), console.status("planning"):
        for shared, levels in LEVELS.items():
            for name, change in CHANGES.items():
                timing = measure_plan(levels, change, steps)
                rows.append(Row(shared, name, timing.median_us, timing.min_us))
    table = Table("256 sequences share", *(f"{name}, us" for name in CHANGES))
    for shared in LEVELS:
        table.add_row(shared, *(f"{row.median_us:,.0f}" for row in rows if row.shared == shared))
    console.print(table)
    if json_path:
        content = {"machine": describe_machine(), "rows": [asdict(row) for row in rows]}
        json_path.write_text(json.dumps(content, indent=2) + "\n")
