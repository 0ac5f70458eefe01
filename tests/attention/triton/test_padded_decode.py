"""A decoding batch's fixed buffers: what fits, and what is in them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention_batches import query_batch, shared_chunks

from radixkv.attention.triton import TritonBackend
from radixkv.attention.triton.buffers import padded_size, padded_sizes
from radixkv.attention.triton.cost_model import sharing_rule
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.attention.triton.work_items import HeadShape
from radixkv.memory import KVPool, LayerShape
from radixkv_kernels import NO_PARTIAL

SHAPE = HeadShape(8, 4)
CPU = torch.device("cpu")


def make_backend(num_rows: int, max_blocks: int, dtype: torch.dtype) -> TritonBackend:
    """A backend for 8 heads in groups of 4 on 132 multiprocessors, whose blocks take little memory."""
    return TritonBackend(
        KVPool([LayerShape(8, 4, 4)], 1, 16, dtype),
        dtype,
        32,
        num_rows,
        16 * max_blocks,
        # As with heads of 128.
        sharing=sharing_rule(4, dtype, dtype, 4096),
        multiprocessors=132,
    )


@pytest.mark.parametrize("num_rows", [8, 64, 256])
def test_a_padded_batch_holds_other_trees_than_the_first(num_rows: int) -> None:
    """One long node cut into many pieces, or several levels: memory is allocated before any batch is met."""
    backend = make_backend(num_rows, 8001, torch.bfloat16)
    padded = PaddedDecode(num_rows, backend, True, PartialResults(CPU))
    padded.items(SHAPE)
    for levels in ([(1, 2000)], [(1, 8000)], [(1, 500), (4, 300), (num_rows // 2, 200)]):
        batch = backend.prepare(query_batch(shared_chunks(num_rows, levels)))
        assert padded.load(batch)


@settings(max_examples=150, deadline=None)
@given(
    num_rows=st.integers(1, 40),
    levels=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 500)), max_size=4),
    shape=st.sampled_from([HeadShape(8, 4), HeadShape(4, 7), HeadShape(8, 1), HeadShape(1, 12), HeadShape(2, 20)]),
    multiprocessors=st.sampled_from([20, 84, 108, 132]),
)
# Two samples of each of six long prompts: narrow tiles, of which more run at once than of wide ones, in more pieces.
@example(12, [(6, 448), (12, 3)], HeadShape(8, 4), 132)
def test_a_wide_graph_holds_any_batch_of_its_size(
    num_rows: int, levels: list[tuple[int, int]], shape: HeadShape, multiprocessors: int
) -> None:
    """And the narrow one any that shares nothing."""
    heads, blocks = shape.num_kv_heads, sum(blocks for _, blocks in levels) + 1
    pool = KVPool([LayerShape(heads, 4, 4)], 1, 16, torch.bfloat16)
    backend = TritonBackend(
        pool, torch.bfloat16, heads * shape.group, num_rows, 16 * blocks,
        sharing=replace(sharing_rule(shape.group, torch.bfloat16, torch.bfloat16, 4096), min_saved_tokens=0),
        multiprocessors=multiprocessors,
    )  # fmt: skip
    wide, narrow = (
        PaddedDecode(padded_size(num_rows), backend, is_wide, PartialResults(CPU)) for is_wide in (True, False)
    )
    wide.items(shape), narrow.items(shape)
    batch = backend.prepare(query_batch(shared_chunks(num_rows, levels)))
    assert wide.load(batch)
    assert narrow.load(batch) or not batch.plan.is_flat


def test_few_sizes_of_batches_are_padded_by_few_rows() -> None:
    """As many graphs as there are sizes are captured at the start, two kinds of each."""
    sizes = padded_sizes(256)
    assert sizes[:5] == [1, 2, 4, 8, 10]
    assert sizes[-5:] == [128, 160, 192, 224, 256]
    assert len(sizes) == 24
    assert padded_sizes(100)[-1] == 112
    for num_rows in range(1, 1000):
        assert num_rows <= padded_size(num_rows) <= max(1.25 * num_rows, num_rows + 3)
        assert padded_size(num_rows) < num_rows + 32
        assert padded_size(padded_size(num_rows)) == padded_size(num_rows)


def test_tiles_are_no_wider_than_a_batch_of_its_size_needs() -> None:
    for num_rows, dtype, tiles in ((4, torch.bfloat16, [16]), (8, torch.bfloat16, [64]), (64, torch.float32, [16])):
        backend = make_backend(num_rows, 8001, dtype)
        batch = backend.prepare(query_batch(shared_chunks(num_rows, [(1, 8000)])))
        padded = PaddedDecode(num_rows, backend, True, PartialResults(CPU))
        assert list(padded.items(SHAPE).by_tile) == tiles
        assert padded.load(batch)


def test_fixed_buffers_hold_the_plan_and_padding_behind_it() -> None:
    """Also for a plan smaller than the one before it, of which nothing may be left."""
    backend = make_backend(40, 600, torch.bfloat16)
    batch = backend.prepare(query_batch(shared_chunks(40, [(1, 500), (4, 20)])))
    padded = PaddedDecode(40, backend, True, PartialResults(CPU))
    fixed_items = padded.items(SHAPE)
    assert padded.load(batch)
    where = [
        tensor.data_ptr()
        for tensor in (padded.rows.positions, padded.rows.slots, fixed_items.starts, fixed_items.partials)
    ]
    assert all(address % 16 == where[0] % 16 for address in where)
    for num_rows in (40, 19, 33):
        chunks = shared_chunks(num_rows, [(1, 500), (4, 20 + num_rows)])
        batch = backend.prepare(query_batch(chunks))
        assert padded.load(batch)
        padding = [-1] * (40 - num_rows)
        assert padded.rows.positions.tolist() == [16 * (520 + num_rows)] * num_rows + padding
        assert padded.logit_rows.tolist()[:num_rows] == batch.order.argsort().tolist()
        assert padded.rows.slots.tolist() == [int(chunks[i].table.block_ids[-1]) * 16 for i in batch.order] + padding
        items = batch.items(SHAPE)
        assert fixed_items.starts.tolist() == items.starts.tolist() + [items.num_partials] * len(padding)
        assert torch.equal(fixed_items.partials[: items.num_partials], items.partials)
        for tile, fixed in fixed_items.by_tile.items():
            own = items.by_tile[tile]
            assert torch.equal(fixed[: len(own)], own)
            assert not fixed[len(own) :].any()


def test_each_row_of_a_whole_batch_has_an_item_and_padding_sees_nothing() -> None:
    backend = make_backend(6, 10, torch.bfloat16)
    padded = PaddedDecode(6, backend, False, PartialResults(CPU), whole=True)
    (items,) = padded.items(SHAPE).by_tile.values()
    nothing = [[row, 1, 0, 0, 0, NO_PARTIAL] for row in range(6)]
    assert items.tolist() == nothing
    assert padded.items(SHAPE).num_partials == 0
    for num_rows in (6, 2, 4):
        batch = backend.prepare(query_batch(shared_chunks(num_rows, [])))
        assert batch.plan.is_flat
        assert padded.load(batch)
        (own,) = batch.items(SHAPE).by_tile.values()
        assert items.tolist() == own.tolist() + nothing[num_rows:]
