"""The block tables of sequences: opened, grown, published, forked and closed as the sequences run.

A sequence's table lags behind the sequence: tokens are appended to it when a block is full, so that decoding needs no
bookkeeping per token, and it is brought up to date before a fork and at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockTable, OutOfBlocks, PrefixCache
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.branch_points import BranchPoints
from radixkv.scheduling.request import SequenceGroup, TokenSequence


class SequenceBlocks:
    """Owns every open block table.

    Args:
        branch_points: keeps what prompts have in common inside a block; None: blocks can be split.
    """

    def __init__(self, cache: PrefixCache, branch_points: BranchPoints | None) -> None:
        self._cache = cache
        self._branch_points = branch_points
        self._block_size = cache.block_size

    def open(self, group: SequenceGroup) -> None:
        """Open a table for each sequence and reserve its slots; only for the first if it must prefill a common prefix.

        Raises:
            OutOfBlocks: some tables may be open then.
        """
        num_common = group.num_common_tokens
        first = group.sequences[0]
        for sequence in group.sequences:
            tokens = group.prefill_token_ids if sequence is first else np.array(sequence.token_ids, dtype=np.int32)
            table = self._open_table(sequence, tokens)
            if sequence.num_computed < num_common:
                # The common tokens were evicted, perhaps for the tables before this one. If each sequence computed them
                # again, blocks might not suffice.
                if sequence is not first:
                    self.undo_open(group)
                    # With the common tokens as the prompt, at least one of them is left to compute.
                    table = self._open_table(first, group.prefill_token_ids[:num_common])
                group.num_shared_prefill_tokens = num_common
                self._cache.reserve(table, num_common)
                return
            self._cache.reserve(table, len(sequence.token_ids))

    def undo_open(self, group: SequenceGroup) -> None:
        """Undo `open`, however far it came."""
        for sequence in group.sequences:
            self.abort(sequence)
            sequence.num_computed = 0
        group.num_shared_prefill_tokens = 0

    def num_fork_blocks(self, group: SequenceGroup) -> int:
        """Blocks that a group still takes when its sequences part, once the first has computed what they have in common.

        If these were missing, as beside pins, the group would preempt itself then, and begin again and again.
        """
        size, num_common = self._block_size, group.num_shared_prefill_tokens
        if not num_common:
            return 0
        own = sum(-(-len(sequence.token_ids) // size) - num_common // size for sequence in group.sequences)
        return own - (num_common % size > 0)  # one has the block that the common tokens fill in part

    def reserve(self, sequence: TokenSequence, num_tokens: int) -> bool:
        """Make the slots of the next ``num_tokens`` writable; False, with nothing changed, if blocks run out."""
        assert sequence.table is not None
        try:
            self._cache.reserve(sequence.table, sequence.num_computed + num_tokens)
        except OutOfBlocks:
            return False
        return True

    def reserve_free(self, sequence: TokenSequence, num_tokens: int) -> int:
        """How many of the next ``num_tokens`` slots are, or can be made, writable without evicting anything."""
        table = sequence.table
        assert table is not None
        reach = (table.num_blocks + self._cache.num_free_blocks) * self._block_size
        count = min(num_tokens, reach - sequence.num_computed)
        return count if self.reserve(sequence, count) else 0

    def trim(self, sequence: TokenSequence) -> None:
        """Give back the blocks that were reserved for drafts that proved wrong."""
        assert sequence.table is not None
        self._cache.trim(sequence.table, sequence.num_computed)

    def reserve_next_slots(self, groups: Collection[SequenceGroup]) -> bool:
        """Make the next slot of every sequence writable, in one call; False, with nothing changed, if blocks run out."""
        sequences = [sequence for group in groups for sequence in group.sequences]
        tables = [sequence.table for sequence in sequences if sequence.table is not None]
        try:
            self._cache.reserve_many(tables, [sequence.num_computed + 1 for sequence in sequences])
        except OutOfBlocks:
            return False
        return True

    def commit(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Note the chunks as computed, and publish blocks that are full."""
        for _, sequence, num_tokens, completes in chunks:
            sequence.num_computed += num_tokens
            if num_tokens > 1 or not completes:
                self.publish(sequence)
                if sequence.branch_points and self._branch_points is not None:
                    self._branch_points.keep(sequence)
            else:
                self.publish_at_block_boundary(sequence)

    def publish_at_block_boundary(self, sequence: TokenSequence) -> None:
        """Publish if the last computed token filled a block; in between, there is nothing new that could be shared."""
        stop, num_known = sequence.num_computed, len(sequence.token_ids) - sequence.num_placeholders
        if (stop if stop < num_known else num_known) % self._block_size == 0:
            self.publish(sequence)

    def publish(self, sequence: TokenSequence) -> None:
        """Append all computed and known tokens to the table, as a fork and the end of a sequence need."""
        table = sequence.table
        assert table is not None
        stop = min(sequence.num_computed, sequence.num_known_tokens)
        if table.num_tokens < stop:
            self._cache.append(table, sequence.token_ids[table.num_tokens : stop])

    def fork(self, sequence: TokenSequence, num_children: int) -> list[TokenSequence]:
        """``num_children`` more sequences that continue this one; blocks are shared until their tokens differ."""
        assert sequence.table is not None
        self.publish(sequence)
        return [
            TokenSequence(sequence.request, sequence.index, list(sequence.token_ids), table, sequence.num_computed)
            for table in self._cache.fork(sequence.table, num_children)
        ]

    def fork_prefilled(self, group: SequenceGroup) -> None:
        """Give all sequences of a group tables of their own, once the first has prefilled what they have in common."""
        first, *others = group.sequences
        self.publish(first)
        assert first.table is not None
        for sequence, table in zip(others, self._cache.fork(first.table, len(others)), strict=True):
            sequence.table, sequence.num_computed = table, first.num_computed
        group.num_shared_prefill_tokens = 0

    def close(self, sequence: TokenSequence) -> None:
        """Close the table of a sequence that ended: all of it stays cached, its partly filled last block included."""
        self.publish(sequence)
        assert sequence.table is not None
        self._cache.close(sequence.table)
        sequence.table = None

    def abort(self, sequence: TokenSequence) -> None:
        """Close the table, if there is one, keeping no more cached than was already published."""
        if sequence.table is not None:
            self._cache.abort(sequence.table)
            sequence.table = None

    def _open_table(self, sequence: TokenSequence, tokens: NDArray[np.int32]) -> BlockTable:
        request = sequence.request
        # A request's lower priority is more urgent; the cache keeps a higher priority longer.
        table = sequence.table = self._cache.open(
            tokens,
            request.namespace,
            read=request.reuses_prefixes,
            write=request.write_cache,
            priority=-request.priority,
            owner=request.tenant,
        )
        sequence.num_computed = table.num_tokens
        sequence.branch_points.clear()
        if self._branch_points is not None:
            self._branch_points.add_known(sequence)
        return table
