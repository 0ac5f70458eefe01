"""The plan: which rows read which keys, each exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.attention import AttentionPlan, QueryChunk, build_plan, cost_model


def keys_of_rows(plan: AttentionPlan) -> list[list[int]]:
    """For every row, the pool slots that it reads, in no order; a causal item's up to the row itself."""
    seen: list[list[int]] = [[] for _ in range(plan.num_rows)]
    for item in plan.items:
        for row in range(item.row_start, item.row_stop):
            stop = plan.positions[row] + 1 if item.causal else item.key_stop
            for position in range(item.key_start, stop):
                block = item.block_ids[position // plan.block_size]
                seen[row].append(int(block) * plan.block_size + position % plan.block_size)
    return seen


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[QueryChunk], int]:
    block_size = draw(st.sampled_from([1, 2, 16]))
    paths = draw(st.lists(st.lists(st.sampled_from("ab"), max_size=5), min_size=1, max_size=8))
    ids: dict[str, int] = {}
    chunks = []
    for number, path in enumerate(paths):
        # One block for every distinct prefix of letters, so equal prefixes share, then blocks of its own.
        blocks = [ids.setdefault("".join(path[: i + 1]), len(ids)) for i in range(len(path))]
        num_context = len(blocks) * block_size + draw(st.integers(0, block_size - 1))
        num_new = draw(st.integers(1, 2 * block_size))
        while len(blocks) * block_size < num_context + num_new:
            blocks.append(1000 + 100 * number + len(blocks))
        chunks.append(QueryChunk(np.array(blocks, dtype=np.int32), num_context, num_new))
    return chunks, block_size


@given(batches(), st.sampled_from([1, 3, 100]))
def test_each_row_reads_each_of_its_keys_once(batch: tuple[list[QueryChunk], int], min_saved: int) -> None:
    chunks, block_size = batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cost_model, "MIN_SAVED_TOKENS", min_saved)
        plan = build_plan(chunks, block_size)
    seen = keys_of_rows(plan)
    for place, index in enumerate(plan.order):
        chunk = chunks[index]
        for offset in range(chunk.num_new):
            row = plan.row_starts[place] + offset
            position = chunk.num_context + offset
            expected = [
                int(chunk.block_ids[p // block_size]) * block_size + p % block_size for p in range(position + 1)
            ]
            assert plan.positions[row] == position
            assert plan.slots[row] == expected[-1]
            assert sorted(seen[row]) == sorted(expected)


def test_a_tree_of_three_levels_becomes_nested_items() -> None:
    stem = list(range(32))
    left, right = stem + [40, 41] * 16, stem + [50, 51] * 16
    tables = [[*left, 60], [*right, 61], [*left, 62], [*right, 63]]
    chunks = [QueryChunk(np.array(table, dtype=np.int32), 64 * 16, 1) for table in tables]
    plan = build_plan(chunks, 16)
    shared = [(item.num_rows, item.key_start, item.key_stop) for item in plan.items if item.num_rows > 1]
    assert sorted(shared) == [(2, 512, 1024), (2, 512, 1024), (4, 0, 512)]
    assert plan.order == [0, 2, 1, 3]


def test_too_little_sharing_is_left_alone() -> None:
    chunks = [QueryChunk(np.array([7, 8 + i], dtype=np.int32), 16, 1) for i in range(2)]
    assert [item.num_rows for item in build_plan(chunks, 16).items] == [1, 1]


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "at least one"),
        ([QueryChunk(np.array([1], dtype=np.int32), 0, 0)], "num_new"),
        ([QueryChunk(np.array([1], dtype=np.int32), 16, 1)], "cannot hold"),
    ],
)
def test_impossible_batches_are_refused(chunks: list[QueryChunk], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_plan(chunks, 16)
