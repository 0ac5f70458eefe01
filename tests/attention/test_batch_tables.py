"""The batch's block tables, kept from step to step, against tables built from scratch."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given, settings
from support.attention_batches import query_batch
from support.forking_sequences import ForkingSequences, Steps, steps

from radixkv.attention.batch_tables import BatchTables, common_blocks


@settings(max_examples=200)
@given(batches=steps)
def test_tables_follow_any_change_of_the_batch(batches: Steps) -> None:
    tables, mirror = BatchTables(100, 80), np.zeros((100, 80), dtype=np.int32)
    sequences = ForkingSequences()
    for changes, reverse in batches:
        for change in changes:
            sequences.change(*change)
        batch = query_batch(sequences.chunks(reverse))
        new_blocks = tables.update(batch.tables, batch.num_blocks(16))
        assert len(set(new_blocks.indices.tolist())) == len(new_blocks.indices)
        mirror.reshape(-1)[new_blocks.indices] = new_blocks.block_ids
        assert np.array_equal(mirror, tables.block_ids)
        owners = {table: owner for owner, table in sequences.tables.items() if owner in sequences.blocks}
        assert sorted(owners[table] for table in tables.order) == sorted(sequences.blocks)  # type: ignore[index]
        assert [batch.tables[i] for i in tables.batch_order().tolist()] == tables.order
        rows = []
        for table, index in zip(tables.order, tables.indices, strict=True):
            blocks = sequences.blocks[owners[table]]  # type: ignore[index]
            assert tables.block_ids[index, : len(blocks)].tolist() == blocks
            rows.append(np.array(blocks))
        assert tables.common == [common_blocks(a, b) for a, b in itertools.pairwise(rows)]
        assert sum(tables.common) == sequences.best_sharing()
