"""A decoding batch's fixed buffers: what fits, and what is in them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from radixkv.attention.device_plan import DevicePlanner
from radixkv.attention.lowering import HeadShape
from radixkv.attention.padded_decode import PaddedDecode
from radixkv.attention.plan import QueryChunk
from radixkv.attention.triton_backend import PartialResults
from radixkv.memory import KVPool, LayerShape

SHAPE = HeadShape(8, 4)
CPU = torch.device("cpu")


def make_planner(num_rows: int, max_blocks: int, dtype: torch.dtype) -> DevicePlanner:
    """For 8 heads in groups of 4 on 132 multiprocessors."""
    return DevicePlanner(
        max_sequences=num_rows,
        max_blocks=max_blocks,
        block_size=16,
        shape=SHAPE,
        bytes_per_token=4096,
        element_bytes=dtype.itemsize,
        dtype=dtype,
        device=CPU,
        multiprocessors=132,
    )


def shared_chunks(num_rows: int, levels: list[tuple[int, int]]) -> list[QueryChunk]:
    """Decoding under nodes of ``(how many, blocks each)`` a level."""
    numbers = itertools.count()
    nodes = [[[next(numbers) for _ in range(blocks)] for _ in range(count)] for count, blocks in levels]
    chunks = []
    for row in range(num_rows):
        path = [block for level in nodes for block in level[row * len(level) // num_rows]]
        chunks.append(
            QueryChunk(np.array([*path, next(numbers)], dtype=np.int32), len(path) * 16, 1, owner=f"{levels} {row}")
        )
    return chunks


@pytest.mark.parametrize("num_rows", [8, 64, 256])
def test_a_padded_batch_has_room_for_other_trees_than_the_first(num_rows: int) -> None:
    """One long node cut into many pieces, or several levels: room is made when the first batch of a size is met."""
    pool = KVPool([LayerShape(8, 4, 4)], 1, 16, torch.bfloat16)
    planner = make_planner(num_rows, 8001, torch.bfloat16)
    padded: PaddedDecode | None = None
    for levels in ([(1, 2000)], [(1, 8000)], [(1, 500), (4, 300), (num_rows // 2, 200)]):
        plan = planner.plan(shared_chunks(num_rows, levels))
        if padded is None:
            padded = PaddedDecode(num_rows, pool, plan.buffers, False, PartialResults(CPU))
            assert padded.load(plan)
            padded.make_room(SHAPE)
        assert padded.load(plan)


def test_only_tiles_that_a_batch_can_take_are_launched() -> None:
    for num_rows, dtype, tiles in ((4, torch.bfloat16, [16]), (8, torch.bfloat16, [16, 64]), (64, torch.float32, [16])):
        pool = KVPool([LayerShape(8, 4, 4)], 1, 16, dtype)
        plan = make_planner(num_rows, 8001, dtype).plan(shared_chunks(num_rows, [(1, 8000)]))
        padded = PaddedDecode(num_rows, pool, plan.buffers, False, PartialResults(CPU))
        assert padded.load(plan)
        assert list(padded.make_room(SHAPE).by_tile) == tiles


def test_fixed_buffers_hold_the_plan_and_padding_behind_it() -> None:
    """Also of a plan that is smaller than the one before it, of which nothing may be left."""
    pool = KVPool([LayerShape(8, 4, 4)], 1, 16, torch.bfloat16)
    planner = make_planner(40, 600, torch.bfloat16)
    plan = planner.plan(shared_chunks(40, [(1, 500), (4, 20)]))
    padded = PaddedDecode(40, pool, plan.buffers, False, PartialResults(CPU))
    assert padded.load(plan)
    room = padded.make_room(SHAPE)
    where = [tensor.data_ptr() for tensor in (padded.rows.positions, padded.rows.slots, room.starts, room.partials)]
    assert all(address % 16 == where[0] % 16 for address in where)
    for num_rows in (40, 19, 33):
        chunks = shared_chunks(num_rows, [(1, 500), (4, 20 + num_rows)])
        plan = planner.plan(chunks)
        assert padded.load(plan)
        padding = [-1] * (40 - num_rows)
        assert padded.rows.positions.tolist() == [16 * (520 + num_rows)] * num_rows + padding
        assert padded.rows.slots.tolist() == [int(chunks[i].block_ids[-1]) * 16 for i in plan.order] + padding
        items = plan.items(SHAPE)
        assert room.starts.tolist() == items.starts.tolist() + [items.num_partials] * len(padding)
        assert torch.equal(room.partials[: items.num_partials], items.partials)
        for tile, fixed in room.by_tile.items():
            own = items.by_tile[tile]
            assert torch.equal(fixed[: len(own)], own)
            assert not fixed[len(own) :].any()
