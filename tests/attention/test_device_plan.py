"""What the device plan is made from: who shares what, kept from step to step, against a look at everything anew."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention.batch_buffers import BatchBuffers
from radixkv.attention.batch_tables import BatchColumns, BatchTables
from radixkv.attention.device_plan import DevicePlanner
from radixkv.attention.lowering import HeadShape
from radixkv.attention.plan import QueryChunk, common_blocks


class Sequences:
    """Block tables that share as a cache's do: forks of one another, and every last block its sequence's own."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.owners = itertools.count()
        first = next(self.owners)
        self.blocks: dict[int, list[int]] = {first: [self.fresh()]}
        self.versions: dict[int, int] = {first: 0}

    def fresh(self) -> int:
        # Small and large numbers by turns, so that order by value and order in time differ.
        number = next(self.numbers)
        return number if number % 2 else 5000 - number

    def change(self, kind: str, which: int, length: int) -> None:
        owner = list(self.blocks)[which % len(self.blocks)]
        blocks = self.blocks[owner]
        if kind == "join":
            new = next(self.owners)
            # No more than whole blocks: the last one belongs to its sequence alone.
            self.blocks[new] = [*blocks[: length % len(blocks)], self.fresh()]
            self.versions[new] = 0
        elif kind == "grow":
            blocks.extend(self.fresh() for _ in range(length % 4))
        elif kind == "replace":
            blocks[-1] = self.fresh()
            self.versions[owner] += 1
        elif len(self.blocks) > 1:
            del self.blocks[owner]

    def chunks(self, reverse: bool) -> list[QueryChunk]:
        return [
            QueryChunk(np.array(blocks, dtype=np.int32), 16 * len(blocks) - 1, 1, owner, self.versions[owner])
            for owner, blocks in sorted(self.blocks.items(), reverse=reverse)
        ]

    def best_sharing(self) -> int:
        """The blocks that neighbours have in common in an order in which they have the most."""
        return sum(common_blocks(*map(np.array, pair)) for pair in itertools.pairwise(sorted(self.blocks.values())))


steps = st.lists(
    st.tuples(st.sampled_from(["join", "leave", "grow", "replace"]), st.integers(0, 99), st.integers(0, 99)), max_size=6
)


@settings(max_examples=200)
@given(batches=st.lists(st.tuples(steps, st.booleans()), min_size=1, max_size=12))
def test_tables_follow_any_change_of_the_batch(
    batches: list[tuple[list[tuple[str, int, int]], bool]],
) -> None:
    tables, buffers = BatchTables(100, 80), BatchBuffers(100, 80, torch.device("cpu"))
    sequences = Sequences()
    for changes, reverse in batches:
        for change in changes:
            sequences.change(*change)
        chunks = sequences.chunks(reverse)
        buffers.add(tables.update(chunks, BatchColumns(chunks)))
        assert sorted(tables.order) == sorted(sequences.blocks)  # type: ignore[type-var]
        assert [chunks[i].owner for i in tables.chunk_of(np.array(tables.tables))] == tables.order
        assert torch.equal(buffers.tables, torch.from_numpy(tables.host))
        rows = []
        for owner, table in zip(tables.order, tables.tables, strict=True):
            blocks = sequences.blocks[owner]  # type: ignore[index]
            assert tables.host[table, : len(blocks)].tolist() == blocks
            rows.append(np.array(blocks))
        assert tables.common == [common_blocks(a, b) for a, b in itertools.pairwise(rows)]
        assert sum(tables.common) == sequences.best_sharing()


@settings(max_examples=100)
@given(batches=st.lists(st.tuples(steps, st.booleans()), min_size=1, max_size=8))
def test_a_plan_after_many_others_is_the_one_of_a_new_planner(
    batches: list[tuple[list[tuple[str, int, int]], bool]],
) -> None:
    def new_planner() -> DevicePlanner:
        return make_planner(max_sequences=100, max_blocks=80, bytes_per_token=2**20)

    planner, sequences = new_planner(), Sequences()
    for changes, reverse in batches:
        for change in changes:
            sequences.change(*change)
        chunks = sequences.chunks(reverse)
        kept, anew = planner.plan(chunks), new_planner().plan(chunks)
        assert kept.order == anew.order
        assert kept.row_starts == anew.row_starts
        assert (kept.is_flat, kept.saved_tokens) == (anew.is_flat, anew.saved_tokens)
        assert torch.equal(kept.rows.positions, anew.rows.positions)
        assert torch.equal(kept.rows.slots, anew.rows.slots)
        ours, theirs = kept.items(HeadShape(1, 1)), anew.items(HeadShape(1, 1))
        assert torch.equal(ours.starts, theirs.starts)
        assert torch.equal(ours.partials, theirs.partials)
        assert ours.by_tile.keys() == theirs.by_tile.keys()
        for rows, items in ours.by_tile.items():
            # Which table a sequence has depends on who had it before.
            assert torch.equal(items[:, [0, 1, 3, 4, 5]], theirs.by_tile[rows][:, [0, 1, 3, 4, 5]])
            readers = kept.rows.row_tables[items[:, 0].long()]
            assert torch.equal(items[:, 2], readers)


def make_planner(max_sequences: int = 4, max_blocks: int = 10, bytes_per_token: int = 4) -> DevicePlanner:
    return DevicePlanner(
        max_sequences=max_sequences,
        max_blocks=max_blocks,
        block_size=16,
        shape=HeadShape(1, 1),
        bytes_per_token=bytes_per_token,
        element_bytes=2,
        dtype=torch.float32,
        device=torch.device("cpu"),
        multiprocessors=1,
    )


@pytest.mark.parametrize(
    ("chunks", "message"),
    [
        ([], "expected at least one"),
        ([QueryChunk(np.arange(2, dtype=np.int32), 30, 0, "a")], "num_new must be at least 1"),
        ([QueryChunk(np.arange(2, dtype=np.int32), -1, 1, "a")], "num_context at least 0"),
        ([QueryChunk(np.arange(2, dtype=np.int32), 32, 1, "a")], "2 blocks of 16 tokens cannot hold"),
        ([QueryChunk(np.arange(2, dtype=np.int32), 30, 1, "a")] * 2, "an owner for each, all different"),
        ([QueryChunk(np.arange(11, dtype=np.int32), 30, 1, "a")], "room for 4 sequences of 10 blocks"),
    ],
)
def test_bad_batches_are_refused_and_change_nothing(chunks: list[QueryChunk], message: str) -> None:
    planner = make_planner()
    good = [
        QueryChunk(np.arange(2, dtype=np.int32), 30, 1, "a"),
        QueryChunk(np.arange(5, 7, dtype=np.int32), 20, 1, "b"),
    ]
    before = planner.plan(good)
    slots = before.rows.slots.clone()
    with pytest.raises(ValueError, match=message):
        planner.plan(chunks)
    assert planner._tables.order == ["a", "b"]
    after = planner.plan(good)
    assert torch.equal(after.rows.slots, slots)
    assert after.order == before.order
