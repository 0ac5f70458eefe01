"""Work items against what they are for: each row reads each of its keys once, and finds what was written for it."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from radixkv.attention.device_plan import DevicePlan, DevicePlanner
from radixkv.attention.lowering import HeadShape
from radixkv.attention.plan import QueryChunk
from radixkv_kernels import NO_PARTIAL


def make_plan(
    levels: list[list[int]], num_new: int, shape: HeadShape, multiprocessors: int, shares: bool
) -> DevicePlan:
    """A sequence for each list, of so many blocks of its own on each level; 0: the ones of the sequence before it."""
    numbers = itertools.count()
    chunks: list[QueryChunk] = []
    above: list[range] = []
    for owner, counts in enumerate(levels):
        shared = next((i for i, count in enumerate(counts) if count), len(counts)) if above else 0
        first = next(numbers) * 10_000
        above = above[:shared] + [range(first + 2000 * i, first + 2000 * i + n) for i, n in enumerate(counts[shared:])]
        blocks = [*itertools.chain(*above), first + 9_999]
        length = 16 * len(blocks) - owner % 16
        new = min(num_new, length) if owner % 2 else 1
        chunks.append(QueryChunk(np.array(blocks, dtype=np.int32), length - new, new, owner))
    planner = DevicePlanner(
        max_sequences=len(chunks),
        max_blocks=max(len(chunk.block_ids) for chunk in chunks),
        block_size=16,
        shape=shape,
        bytes_per_token=2**30 if shares else 1,
        element_bytes=2,
        dtype=torch.bfloat16,
        device=torch.device("cpu"),
        multiprocessors=multiprocessors,
    )
    return planner.plan(chunks)


@settings(max_examples=100, deadline=None)
@given(
    levels=st.lists(st.lists(st.just(0) | st.integers(0, 1000), min_size=3, max_size=3), min_size=1, max_size=20),
    num_new=st.sampled_from([1, 1, 40]),
    shape=st.builds(HeadShape, st.sampled_from([1, 2, 8]), st.sampled_from([1, 4, 5, 16])),
    multiprocessors=st.sampled_from([1, 132]),
    shares=st.booleans(),
)
@example([[1250, 281, 0], [0, 281, 0]], 1, HeadShape(2, 4), 132, True)
def test_each_row_reads_each_key_once_however_far_it_grows(
    levels: list[list[int]], num_new: int, shape: HeadShape, multiprocessors: int, shares: bool
) -> None:
    plan = make_plan(levels, num_new, shape, multiprocessors, shares)
    items = plan.items(shape)
    reads: list[list[list[int]]] = [[] for _ in range(plan.num_rows)]
    for row_start, num_rows, _, start, stop, partial in np.concatenate(list(items.by_tile.values())).tolist():
        for i in range(num_rows):
            reads[row_start + i].append([start, stop, partial if partial == NO_PARTIAL else partial + i])
    partials = np.split(items.partials.numpy(), items.starts.numpy()[1:-1])
    for row, position in enumerate(plan.rows.positions.tolist()):
        written = sorted(partial for _, _, partial in reads[row])
        assert written == (sorted(partials[row].tolist()) or [NO_PARTIAL])
        grows = 512 if num_new == 1 else 0
        for keys in (position + 1, position + 1 + grows):
            seen = sorted((start, min(stop, keys)) for start, stop, _ in reads[row] if start < keys)
            assert [0, *(stop for _, stop in seen)] == [*(start for start, _ in seen), keys]
    assert len(items.starts) == plan.num_rows + 1
    assert items.num_partials == items.starts[-1] == len(items.partials)
