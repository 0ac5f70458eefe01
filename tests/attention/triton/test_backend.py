"""What is planned and uploaded for kernels after many other batches, against a backend that has seen none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from support.attention_batches import query_batch
from support.forking_sequences import ForkingSequences, Steps, steps

from radixkv.attention.triton import TritonBackend, cost_model
from radixkv.attention.triton.work_items import HeadShape
from radixkv.memory import KVPool, LayerShape


def make_backend(max_num_seqs: int, max_blocks: int) -> TritonBackend:
    """A backend for one head, float32 queries and bfloat16 keys and values."""
    pool = KVPool([LayerShape(1, 8, 8)], 1, 16, torch.bfloat16)
    return TritonBackend(pool, torch.float32, 1, max_num_seqs, 16 * max_blocks)


@settings(max_examples=100, deadline=None)
@given(batches=steps)
def test_a_batch_after_many_others_is_prepared_as_the_first_one_is(batches: Steps) -> None:
    with pytest.MonkeyPatch.context() as patch:
        # As if a token took a megabyte, so that some of the batches share enough and others do not.
        patch.setattr(cost_model, "MIN_SAVED_BYTES", cost_model.MIN_SAVED_BYTES * 32 // 2**20)
        experienced, sequences = make_backend(100, 80), ForkingSequences()
        for changes, reverse in batches:
            for change in changes:
                sequences.change(*change)
            batch = query_batch(sequences.chunks(reverse))
            kept, anew = experienced.prepare(batch), make_backend(100, 80).prepare(batch)
            assert kept.order.tolist() == anew.order.tolist()
            assert kept.row_starts.tolist() == anew.row_starts.tolist()
            assert (kept.plan.is_flat, kept.plan.saved_tokens) == (anew.plan.is_flat, anew.plan.saved_tokens)
            assert torch.equal(kept.rows.positions, anew.rows.positions)
            assert torch.equal(kept.rows.slots, anew.rows.slots)
            assert torch.equal(kept.buffers.tables, torch.from_numpy(kept.plan.block_ids))
            ours, theirs = kept.items(HeadShape(1, 1)), anew.items(HeadShape(1, 1))
            assert torch.equal(ours.starts, theirs.starts)
            assert torch.equal(ours.partials, theirs.partials)
            assert ours.by_tile.keys() == theirs.by_tile.keys()
            for tile_rows, items in ours.by_tile.items():
                # Which table a sequence gets depends on which sequence had it before.
                assert torch.equal(items[:, [0, 1, 3, 4, 5]], theirs.by_tile[tile_rows][:, [0, 1, 3, 4, 5]])
                readers = kept.rows.row_tables[items[:, 0].long()]
                assert torch.equal(items[:, 2], readers)
