"""What planning a decoding batch for the GPU costs the host, when sequences leave and others join. Needs Triton, no GPU.

Timed from the sequences' tables and lengths until all that a CUDA graph reads is in its buffers, which here lie on the CPU. A
step in which no sequence joins or leaves has no row, because a kernel advances its plan.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from rich.console import Console

from radixkv.attention import QueryBatch, ReadableTable
from radixkv.attention.triton import TritonBackend
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.attention.triton.work_items import HeadShape
from radixkv.bench.common.figures import write_figures
from radixkv.bench.common.machine import describe_machine
from radixkv.bench.common.tables import figure_table
from radixkv.bench.common.timing import Timing, frozen_garbage
from radixkv.bench.gpu.layer import FixedTable
from radixkv.memory import KVPool, LayerShape

BATCH, LENGTH, BLOCK_SIZE = 256, 4096, 16
ROUNDS = 7
SHAPE = HeadShape(num_kv_heads=8, group=4)
CPU = torch.device("cpu")

# Blocks that sequences share: (groups of sequences, blocks that each group has in common), from the root on.
Levels = Sequence[tuple[int, int]]
LEVELS: Mapping[str, Levels] = MappingProxyType(
    {
        "nothing": (),
        "one prefix of 3,500 tokens": ((1, 218),),
        "three levels, 73 nodes": ((1, 96), (8, 64), (64, 48)),
    }
)


@dataclass(frozen=True, slots=True)
class Change:
    """What happens to a batch from one step to the next.

    Attributes:
        count: sequences that leave, and others that join.
        elsewhere: those that join share prefixes at random places; otherwise those of the sequences that left, so that the
            prefix tree stays as it is.
    """

    count: int
    elsewhere: bool = False


CHANGES: Mapping[str, Change] = MappingProxyType(
    {
        "1 joins where 1 left": Change(1),
        "1 joins elsewhere": Change(1, elsewhere=True),
        "16 join where 16 left": Change(16),
        "all 256 are new": Change(BATCH),
    }
)


@dataclass(frozen=True, slots=True)
class Row:
    """Planning one step, all work items for one shape of heads included.

    Attributes:
        shared: what the sequences share.
        change: what leaves and joins.
    """

    shared: str
    change: str
    median_us: float
    min_us: float


@dataclass(frozen=True, slots=True)
class Decoding:
    """A sequence at one step: ``length`` tokens are in its blocks, one more is computed."""

    owner: int
    table: FixedTable
    length: int


def make_sequence(owner: int, levels: Levels, length: int, num_steps: int) -> Decoding:
    """A sequence that may grow for ``num_steps``; it shares the levels' blocks with those whose ``owner % BATCH`` is near."""
    index = owner % BATCH
    nodes = [
        (1 + depth * BATCH + index * groups // BATCH) * LENGTH + np.arange(num_blocks)
        for depth, (groups, num_blocks) in enumerate(levels)
    ]
    own = (1 + len(levels) * BATCH + owner) * LENGTH
    num_own = (length + num_steps) // BLOCK_SIZE + 1 - sum(num_blocks for _, num_blocks in levels)
    block_ids = np.concatenate([*nodes, own + np.arange(num_own)]).astype(np.int32)
    return Decoding(owner, FixedTable(block_ids), length)


def make_steps(levels: Levels, change: Change, count: int) -> list[list[Decoding]]:
    """The batches of a run: in each, random sequences are replaced by others, and the rest grow by a token."""
    rng = np.random.default_rng(0)
    batch = {owner: make_sequence(owner, levels, LENGTH - int(rng.integers(100)), count) for owner in range(BATCH)}
    steps = [list(batch.values())]
    for step in range(1, count + 1):
        leaving = rng.choice(list(batch), change.count, replace=False)
        joining = rng.choice(BATCH, change.count, replace=False) if change.elsewhere else leaving % BATCH
        batch = {
            owner: replace(sequence, length=sequence.length + 1)
            for owner, sequence in batch.items()
            if owner not in leaving
        }
        for owner in (step * BATCH + joining).tolist():
            batch[owner] = make_sequence(owner, levels, LENGTH - int(rng.integers(100)), count)
        steps.append(list(batch.values()))
    return steps


def measure_plan(levels: Levels, change: Change, count: int) -> Timing:
    """Processor time of this thread from a step's tables and lengths to its plan in a graph's buffers.

    All steps are planned in several rounds, and each step's fastest round counts, because other work on the machine takes a
    part of the processor's caches.
    """
    steps = make_steps(levels, change, count)
    times = np.min([_plan_all(steps, count) for _ in range(ROUNDS)], axis=0)
    return Timing(float(np.median(times)), float(times.min()))


def _plan_all(steps: Sequence[list[Decoding]], count: int) -> list[float]:
    """Microseconds for each step but the first."""
    pool = KVPool([LayerShape(SHAPE.num_kv_heads, 128, 128)], 1, BLOCK_SIZE, torch.bfloat16)
    num_query_heads = SHAPE.num_kv_heads * SHAPE.group
    backend = TritonBackend(pool, torch.bfloat16, num_query_heads, BATCH, LENGTH + count + 1, multiprocessors=132)
    first, *others = steps
    prepared = backend.prepare(_query_batch(*_columns(first)))
    padded = PaddedDecode(BATCH, backend, not prepared.plan.is_flat, PartialResults(CPU))
    padded.items(SHAPE)
    padded.load(prepared)
    times = []
    with frozen_garbage():
        for batch in others:
            columns = _columns(batch)
            start = time.thread_time_ns()
            loaded = padded.load(backend.prepare(_query_batch(*columns)))
            times.append((time.thread_time_ns() - start) / 1e3)
            assert loaded, "a graph holds any batch of its size"
    return times


def _columns(batch: list[Decoding]) -> tuple[list[ReadableTable], list[int]]:
    return [sequence.table for sequence in batch], [sequence.length for sequence in batch]


def _query_batch(tables: list[ReadableTable], lengths: list[int]) -> QueryBatch:
    return QueryBatch(tables, np.array(lengths, dtype=np.int64), np.ones(len(lengths), dtype=np.int64))


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch stands in for a GPU here; with more threads, the measured one would include waiting for the others."""
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
    table = figure_table("256 sequences share", *(f"{name}, us" for name in CHANGES))
    for shared in LEVELS:
        table.add_row(shared, *(f"{row.median_us:,.0f}" for row in rows if row.shared == shared))
    console.print(table)
    content = {"machine": describe_machine("torch", "triton"), "rows": [asdict(row) for row in rows]}
    write_figures(json_path, content)
