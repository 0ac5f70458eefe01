"""The plan: which rows read which keys, each exactly once."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.attention_batches import Chunk, Table, query_batch

from radixkv.attention import AttentionPlan, Planner, QueryBatch, SharingRule
from radixkv.attention.host_backend import HostBackend
from radixkv.attention.native import NativeBackend
from radixkv.attention.torch_cpu import TorchBackend

TORCH_RULE = SharingRule(cost_tokens=TorchBackend.sharing_cost_tokens)


def make_plan(chunks: list[Chunk], block_size: int = 16, sharing: SharingRule | None = None) -> AttentionPlan:
    """A plan by a planner of its own, with the rule of torch's backend unless another is given."""
    longest = max(len(chunk.table.block_ids) for chunk in chunks)
    return Planner(len(chunks), longest, block_size, sharing or TORCH_RULE).plan(query_batch(chunks))


def slots_of_rows(plan: AttentionPlan) -> list[list[int]]:
    """For every row, the pool slots that it reads, in any order: from each range those up to the row's own position."""
    seen: list[list[int]] = [[] for _ in range(plan.num_rows)]
    ranges = plan.ranges
    columns = (ranges.row_start, ranges.row_stop, ranges.table, ranges.key_start, ranges.key_stop)
    for row_start, row_stop, table, key_start, key_stop in np.stack(columns, axis=1).tolist():
        for row in range(row_start, row_stop):
            for position in range(key_start, min(key_stop, int(plan.positions[row]) + 1)):
                block = plan.block_ids[table, position // plan.block_size]
                seen[row].append(int(block) * plan.block_size + position % plan.block_size)
    return seen


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[Chunk], int]:
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
        chunks.append(Chunk(Table(blocks), num_context, num_new))
    return chunks, block_size


@given(batches(), st.sampled_from([1, 3, 100]))
def test_each_row_reads_each_of_its_keys_once(batch: tuple[list[Chunk], int], cost_tokens: int) -> None:
    chunks, block_size = batch
    plan = make_plan(chunks, block_size, SharingRule(cost_tokens=cost_tokens))
    seen = slots_of_rows(plan)
    for position_in_order, index in enumerate(plan.order):
        chunk = chunks[index]
        for offset in range(chunk.num_new):
            row = plan.row_starts[position_in_order] + offset
            position = chunk.num_context + offset
            expected = [
                int(chunk.table.block_ids[p // block_size]) * block_size + p % block_size for p in range(position + 1)
            ]
            assert plan.positions[row] == position
            assert plan.slots[row] == expected[-1]
            assert sorted(seen[row]) == sorted(expected)


def test_a_tree_of_three_levels_becomes_nested_ranges() -> None:
    stem = list(range(32))
    left, right = stem + [40, 41] * 16, stem + [50, 51] * 16
    tables = [[*left, 60], [*right, 61], [*left, 62], [*right, 63]]
    plan = make_plan([Chunk(Table(table), 64 * 16, 1) for table in tables])
    ranges = plan.ranges
    assert ranges.num_shared == 3
    rows = (ranges.row_stop - ranges.row_start).tolist()
    shared = list(zip(rows, ranges.key_start.tolist(), ranges.key_stop.tolist(), strict=True))[:3]
    assert sorted(shared) == [(2, 512, 1024), (2, 512, 1024), (4, 0, 512)]
    assert plan.order.tolist() == [0, 2, 1, 3]


@pytest.mark.parametrize("backend", [NativeBackend, TorchBackend])
def test_a_shared_prefix_is_read_once(backend: type[HostBackend]) -> None:
    chunks = [Chunk(Table([*range(64), 100 + i]), 64 * 16, 1) for i in range(8)]
    ranges = make_plan(chunks, sharing=SharingRule(cost_tokens=backend.sharing_cost_tokens)).ranges
    assert (ranges.key_stop - ranges.key_start).sum() == 64 * 16 + 8 * 1
    assert ranges.row_stop[0] - ranges.row_start[0] == 8


def test_too_little_sharing_is_left_alone() -> None:
    plan = make_plan([Chunk(Table([7, 8 + i]), 16, 1) for i in range(2)])
    assert plan.ranges.num_shared == 0
    assert (plan.ranges.row_stop - plan.ranges.row_start).tolist() == [1, 1]


def test_a_decoding_batch_that_saves_too_little_is_flat() -> None:
    chunks = [Chunk(Table([*range(64), 100 + i]), 64 * 16, 1) for i in range(3)]
    for min_saved, is_flat in ((2 * 64 * 16, False), (2 * 64 * 16 + 1, True)):
        plan = make_plan(chunks, sharing=SharingRule(min_saved_tokens=min_saved))
        assert (plan.is_flat, plan.ranges.num_shared) == (is_flat, 0 if is_flat else 1)
        assert plan.saved_tokens == (0 if is_flat else 2 * 64 * 16)
    # A prompt among them is read by items anyway.
    prompt = make_plan([*chunks[1:], Chunk(chunks[0].table, 64 * 16, 2)], sharing=SharingRule(min_saved_tokens=2**40))
    assert (prompt.is_flat, prompt.ranges.num_shared) == (False, 1)


def one(context: int, new: int, num_blocks: int = 2) -> QueryBatch:
    return query_batch([Chunk(Table(range(num_blocks)), context, new)])


TWICE = Chunk(Table(range(2)), 30, 1)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (query_batch([]), "tables: expected at least one sequence, got none"),
        (one(30, 0), "num_new: expected at least 1, got 0 for sequence 0"),
        (one(-1, 1), "num_context: expected at least 0, got -1 for sequence 0"),
        (one(32, 1), "tables: expected 3 blocks to hold sequence 0's tokens, got 2"),
        (query_batch([TWICE] * 2), "tables: expected 2 different ones, got 1"),
        (one(170, 1, num_blocks=11), "tables: expected at most 4 sequences of 10 blocks, got 1 of up to 11"),
        (QueryBatch([Table([1])], np.zeros(1, np.int64), np.ones(2, np.int64)), r"num_new: expected shape \[1\]"),
        (query_batch([Chunk(Table([i]), 0, 1) for i in range(5)]), "tables: expected at most 4 .*, got 5 of up to 1"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(batch: QueryBatch, message: str) -> None:
    planner = Planner(4, 10, 16, TORCH_RULE)
    good = [Chunk(Table(range(2)), 30, 1), Chunk(Table(range(5, 7)), 20, 1)]
    before = planner.plan(query_batch(good))
    with pytest.raises(ValueError, match=message):
        planner.plan(batch)
    assert planner._tables.order == [chunk.table for chunk in good]
    after = planner.plan(query_batch(good))
    assert (after.order.tolist(), after.slots.tolist()) == (before.order.tolist(), before.slots.tolist())
    assert not len(after.new_blocks.indices)
    grown = [Chunk(chunk.table, chunk.num_context + 1, 1) for chunk in good]
    assert planner.advance(query_batch(grown)) is not None


def test_a_step_that_continues_the_last_one_adds_blocks_only() -> None:
    planner = Planner(4, 10, 16, TORCH_RULE)
    chunks = [Chunk(Table([4, 9]), 30, 1), Chunk(Table([6]), 10, 1)]
    planner.plan(query_batch(chunks))
    chunks = [Chunk(chunk.table, chunk.num_context + 1, 1) for chunk in chunks]
    added = planner.advance(query_batch(chunks))
    assert added is not None
    assert not len(added.indices)
    chunks[0].table.block_ids = np.array([4, 9, 2], dtype=np.int32)
    chunks = [Chunk(chunk.table, chunk.num_context + 1, 1) for chunk in chunks]
    added = planner.advance(query_batch(chunks))
    assert added is not None
    assert added.block_ids.tolist() == [2]
    following = [Chunk(chunk.table, chunk.num_context + 1, 1) for chunk in chunks]
    for other in (
        following[::-1],
        following[1:],
        chunks,
        [following[0], Chunk(chunks[1].table, chunks[1].num_context + 1, 2)],
    ):
        assert planner.advance(query_batch(other)) is None
    chunks[1].table.version += 1
    assert planner.advance(query_batch(following)) is None


def test_a_step_whose_table_is_too_short_is_refused_and_changes_nothing() -> None:
    planner = Planner(4, 10, 16, TORCH_RULE)
    chunk = Chunk(Table([4, 9]), 31, 1)
    planner.plan(query_batch([chunk]))
    following = query_batch([Chunk(chunk.table, 32, 1)])
    with pytest.raises(ValueError, match="expected 3 blocks to hold sequence 0's tokens, got 2"):
        planner.advance(following)
    chunk.table.block_ids = np.array([4, 9, 7], dtype=np.int32)
    added = planner.advance(following)
    assert added is not None
    assert added.block_ids.tolist() == [7]


def test_a_batch_decodes_if_a_token_of_the_answer_follows_every_row() -> None:
    """Where it did not say how many, one for each sequence, it was taken for one that does not decode."""
    decoding, drafting = (
        query_batch([Chunk(Table([i]), 4, 1) for i in range(3)]),
        query_batch([Chunk(Table([0]), 4, 3)]),
    )
    assert decoding.decodes
    assert not drafting.decodes
    assert replace(drafting, num_decoding=np.array([3])).decodes
    assert not replace(decoding, num_decoding=np.array([1, 0, 1])).decodes
