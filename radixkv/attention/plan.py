"""The attention plan: which query rows read which range of keys, a shared prefix once for all rows below it.

Each range of keys yields a partial result, an output and its log-sum-exp, for each of its rows; a backend merges each row's
partial results. (Splitting attention at shared prefixes: Hydragen, Juravsky et al. 2024, and ChunkAttention, Ye et al. 2024;
merging by log-sum-exp: FlashAttention and Flash-Decoding, Dao et al. 2022 and 2023.)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.batch_tables import BatchTables, NewBlocks
from radixkv.attention.prefix_groups import PrefixGroups, prefix_groups
from radixkv.attention.query_batch import Ints, QueryBatch, concatenated_ranges
from radixkv.attention.sharing_rule import SharingRule


@dataclass(frozen=True, slots=True)
class KeyRanges:
    """Ranges of keys with the query rows that read them: shared prefixes first, then each sequence's private tail.

    All columns are int64 ``[ranges]``. Every row's keys are covered exactly once. No row sees a key beyond its own position,
    which matters in the tails of sequences with several new tokens: their last keys are those tokens.

    Attributes:
        row_start: the first of neighbouring query rows.
        row_stop: one past the last.
        table: the row of ``AttentionPlan.block_ids`` through which the keys are found; any one of the range's sequences'.
        key_start: the first key's position.
        key_stop: one past the last.
        num_decoding: how many of a private tail's last rows a token of the answer follows, see `QueryBatch`; 0 for shared
            prefixes.
        num_shared: how many of the ranges are shared prefixes.
    """

    row_start: Ints
    row_stop: Ints
    table: Ints
    key_start: Ints
    key_stop: Ints
    num_decoding: Ints
    num_shared: int


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """One batch's work, the same for every layer.

    Attributes:
        order: int64 ``[sequences]``: indices of the query batch's sequences, in the order of their rows in the packed batch.
        row_starts: int64 ``[sequences + 1]``: the rows of ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        positions: int64 ``[rows]``: of each row's token in its sequence.
        slots: int64 ``[rows]``: where each row's new key and value go: block id * block size + position in the block.
        row_tables: int64 ``[rows]``: which row of ``block_ids`` each query row reads through.
        ranges: which keys are read by which rows.
        block_ids: int32 ``[tables, blocks]``, the planner's own: valid until the next batch is planned.
        block_size: tokens per block.
        new_blocks: what this batch added to ``block_ids``.
        is_flat: one new token per sequence, and nothing shared.
        saved_tokens: keys that sharing saves reading, per layer.
    """

    order: Ints
    row_starts: Ints
    positions: Ints
    slots: Ints
    row_tables: Ints
    ranges: KeyRanges
    block_ids: NDArray[np.int32]
    block_size: int
    new_blocks: NewBlocks
    is_flat: bool
    saved_tokens: int

    @property
    def num_rows(self) -> int:
        return int(self.row_starts[-1])

    def rows_in_query_order(self) -> Ints:
        """int64 ``[rows]``: for each token of the query batch, one sequence after the other, its row in the packed batch."""
        starts, counts = np.empty_like(self.order), np.empty_like(self.order)
        starts[self.order], counts[self.order] = self.row_starts[:-1], np.diff(self.row_starts)
        return concatenated_ranges(starts, counts)


class Planner:
    """Plans one batch after another, and reuses what a batch has in common with the last one."""

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, sharing: SharingRule) -> None:
        self._tables = BatchTables(max_num_seqs, max_blocks)
        self._block_size = block_size
        self._sharing = sharing
        # Groups are reused while neighbours have as many blocks in common as before, and sequences as many new tokens.
        self._common: list[int] = []
        self._num_new: list[int] = [1]
        self._groups: PrefixGroups = prefix_groups(self._common, self._num_new, block_size, sharing)
        # After a decoding batch: ``num_context`` of a batch that would continue it.
        self._next_context: Ints | None = None

    def advance(self, batch: QueryBatch) -> NewBlocks | None:
        """What the batch adds to the block tables, if it only continues the last batch; otherwise None, and nothing changes.

        It continues the last batch if both have one new token for each of the same sequences. Then the last plan stays valid;
        every position is one higher, and every private tail one key longer.

        Raises:
            ValueError: as `plan`.
        """
        if (
            self._next_context is None
            or not np.array_equal(batch.num_context, self._next_context)
            or not (batch.num_new == 1).all()
            or not self._tables.is_unchanged(batch.tables)
        ):
            return None
        new_blocks = self._tables.extend(batch.num_blocks(self._block_size))
        self._next_context = batch.num_context + 1
        return new_blocks

    def plan(self, batch: QueryBatch) -> AttentionPlan:
        """Lay out the packed batch, and find what its sequences share.

        Raises:
            ValueError: the batch is invalid (see `QueryBatch.check`), exceeds the sequences or blocks that the planner was
                made for, or has a table that does not reach to its last new token; nothing has changed then.
        """
        batch.check()
        new_blocks = self._tables.update(batch.tables, batch.num_blocks(self._block_size))
        self._next_context = batch.num_context + 1 if (batch.num_new == 1).all() else None
        return self._lay_out(batch, new_blocks)

    def _lay_out(self, batch: QueryBatch, new_blocks: NewBlocks) -> AttentionPlan:
        size, block_ids = self._block_size, self._tables.block_ids
        table = np.array(self._tables.indices, dtype=np.int64)
        order = self._tables.batch_order()
        context, num_new = batch.num_context[order], batch.num_new[order]
        sequences = np.arange(len(order))
        row_starts = np.zeros(len(order) + 1, dtype=np.int64)
        num_new.cumsum(out=row_starts[1:])
        sequence_of_row = sequences.repeat(num_new)
        positions = np.arange(len(sequence_of_row)) + (context - row_starts[:-1])[sequence_of_row]
        row_tables = table[sequence_of_row]
        blocks, offsets = divmod(positions, size)
        slots = block_ids[row_tables, blocks].astype(np.int64) * size + offsets

        groups = self._prefix_groups(num_new.tolist())
        shared, private_from, saved_tokens = groups.ranges, groups.private_from, groups.saved_tokens
        decodes = len(positions) == len(order)
        is_flat = decodes and saved_tokens < self._sharing.min_saved_tokens
        if is_flat:
            shared, private_from, saved_tokens = shared[:, :0], np.zeros_like(context), 0
        tails = np.array((sequences, sequences + 1, private_from, context + num_new))
        first, last, key_start, key_stop = np.concatenate((shared, tails), axis=1)
        num_shared = shared.shape[1]
        num_decoding = np.zeros(len(first), dtype=np.int64)
        num_decoding[num_shared:] = 1 if batch.num_decoding is None else batch.num_decoding[order]
        return AttentionPlan(
            order=order,
            row_starts=row_starts,
            positions=positions,
            slots=slots,
            row_tables=row_tables,
            ranges=KeyRanges(
                row_starts[first], row_starts[last], table[first], key_start, key_stop, num_decoding, num_shared
            ),
            block_ids=block_ids,
            block_size=size,
            new_blocks=new_blocks,
            is_flat=is_flat,
            saved_tokens=saved_tokens,
        )

    def _prefix_groups(self, num_new: list[int]) -> PrefixGroups:
        if self._tables.common != self._common or num_new != self._num_new:
            self._common, self._num_new = self._tables.common.copy(), num_new
            self._groups = prefix_groups(self._common, num_new, self._block_size, self._sharing)
        return self._groups
