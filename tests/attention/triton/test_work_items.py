"""Work items against their purpose: each row reads each of its keys once, and finds what was written for it."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.attention_batches import Chunk, Table, query_batch

from radixkv.attention.triton import TritonAttention, TritonBackend
from radixkv.attention.triton.cost_model import max_partials, max_pieces, max_tiles, sharing_rule
from radixkv.attention.triton.work_items import HeadShape
from radixkv.memory import KVPool, LayerShape
from radixkv_kernels import NO_PARTIAL


def prepare(
    levels: list[list[int]], num_new: int, shape: HeadShape, multiprocessors: int, shares: bool
) -> TritonAttention:
    """One sequence per list, which gives its own blocks on each level; 0: the blocks of the sequence before it."""
    numbers = itertools.count()
    chunks: list[Chunk] = []
    above: list[range] = []
    for owner, counts in enumerate(levels):
        shared = next((i for i, count in enumerate(counts) if count), len(counts)) if above else 0
        first = next(numbers) * 10_000
        above = above[:shared] + [range(first + 2000 * i, first + 2000 * i + n) for i, n in enumerate(counts[shared:])]
        # New tokens lie in blocks that no other sequence has.
        blocks = [*itertools.chain(*above), *range(first + 9_000, first + 9_001 + -(-(num_new - 1) // 16))]
        length = 16 * len(blocks) - owner % 16
        new = min(num_new, length) if owner % 2 else 1
        chunks.append(Chunk(Table(blocks), length - new, new))
    backend = TritonBackend(
        KVPool([LayerShape(shape.num_kv_heads, 8, 8)], 1, 16, torch.bfloat16),
        torch.bfloat16,
        shape.num_kv_heads * shape.group,
        len(chunks),
        16 * max(len(chunk.table.block_ids) for chunk in chunks),
        sharing=replace(
            sharing_rule(shape.group, torch.bfloat16, torch.bfloat16, 1), min_saved_tokens=0 if shares else 2**40
        ),
        multiprocessors=multiprocessors,
    )
    return backend.prepare(query_batch(chunks))


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
    batch = prepare(levels, num_new, shape, multiprocessors, shares)
    items = batch.items(shape)
    tiles = max_tiles(batch.plan.num_rows, shape.group, torch.bfloat16, batch.tiling)
    for tile_rows, own in items.by_tile.items():
        last_positions = batch.rows.positions[(own[:, 0] + own[:, 1] - 1).long()]
        lengths = torch.minimum(own[:, 4], last_positions + 1) - own[:, 3]
        assert (lengths > 0).all(), "no item of keys that none of its rows sees"
        assert (lengths.diff() <= 0).all(), "longest first"
        most = tiles[tile_rows] + max_pieces(tile_rows, tiles[tile_rows], shape.num_kv_heads, batch.tiling)
        assert len(own) <= most
    assert items.num_partials <= max_partials(batch.plan.num_rows, tiles, shape.group, shape.num_kv_heads, batch.tiling)
    reads: list[list[list[int]]] = [[] for _ in range(batch.plan.num_rows)]
    for row_start, num_rows, _, start, stop, partial in np.concatenate(list(items.by_tile.values())).tolist():
        for i in range(num_rows):
            reads[row_start + i].append([start, stop, partial if partial == NO_PARTIAL else partial + i])
    partials = np.split(items.partials.numpy(), items.starts.numpy()[1:-1])
    for row, position in enumerate(batch.rows.positions.tolist()):
        written = sorted(partial for _, _, partial in reads[row])
        assert written == (sorted(partials[row].tolist()) or [NO_PARTIAL])
        grows = 512 if num_new == 1 else 0
        for keys in (position + 1, position + 1 + grows):
            seen = sorted((start, min(stop, keys)) for start, stop, _ in reads[row] if start < keys)
            assert [0, *(stop for _, stop in seen)] == [*(start for start, _ in seen), keys]
    assert len(items.starts) == batch.plan.num_rows + 1
    assert items.num_partials == items.starts[-1] == len(items.partials)
