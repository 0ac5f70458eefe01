"""Blocks for sequences that grow: free ones first, then what eviction frees; and the copies that must fill them."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_table import BlockTable
from radixkv.cache.errors import OutOfBlocks
from radixkv.cache.pin import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``num_tokens`` slots of block ``source`` are to be copied into block ``target``."""

    source: int
    target: int
    num_tokens: int


class BlockSupply:
    """What one cache's sequences take their blocks from.

    Args:
        pool: where free blocks are taken from.
        block_size: tokens a block.
        tree: whose leaves are evicted when none is free.
        pins: that are released when they have expired, before anything is evicted or refused.
        stats: where evictions and copies are counted.
    """

    def __init__(self, pool: BlockPool, block_size: int, tree: RadixTree, pins: Pins, stats: CacheStats) -> None:
        self._pool = pool
        self._block_size = block_size
        self._tree = tree
        self._pins = pins
        self._stats = stats
        self._copies: list[BlockCopy] = []

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be freed."""
        return self._pool.num_free + self._tree.num_evictable_blocks

    def require(self, count: int) -> None:
        """Make sure that ``count`` blocks can be had; takes none.

        Raises:
            OutOfBlocks: they cannot.
        """
        if count > self.num_available:
            self._pins.release_expired()
            if count > self.num_available:
                raise OutOfBlocks(count, self._pool.num_free, self._tree.num_evictable_blocks)

    def shares_tail(self, table: BlockTable) -> bool:
        """Only the partly filled tail block can have other owners: forks that begin in it."""
        tail = table._num_tokens // self._block_size
        return tail < table._num_blocks and bool(self._pool.ref_counts[table._ids[tail]] > 1)

    def grow(self, table: BlockTable, num_new: int, copies_tail: bool) -> None:
        """Give a table ``num_new`` blocks more, and one of its own for a tail that it shares; `require` comes first."""
        if num_new == 1 and not copies_tail:
            table._add_block(self.allocate_one(after=table._last_block()))
        elif num_new or copies_tail:
            # Taken all at once, before the table changes.
            tail = table._num_tokens // self._block_size
            before = (int(table._ids[tail - 1]) if tail else None) if copies_tail else table._last_block()
            self._make_free(num_new + copies_tail)
            blocks = self._pool.allocate(num_new + copies_tail, after=before)
            if copies_tail:
                shared = table._ids[tail : tail + 1].copy()
                self.queue_copy(int(shared[0]), int(blocks[0]), table._num_tokens % self._block_size)
                table._ids[tail] = blocks[0]
                table.version += 1
                self._pool.release(shared)
            table._add_blocks(blocks[int(copies_tail) :])
        table._num_writable = table._num_blocks * self._block_size

    def allocate_one(self, after: int | None) -> int:
        """A block of the caller's own, the one after ``after`` where it can.

        Raises:
            OutOfBlocks: none can be had.
        """
        self._make_free(1)
        return self._pool.allocate_one(after)

    def queue_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Have the first ``num_tokens`` slots of ``source`` copied into ``target``."""
        self._stats.copied_blocks += 1
        # The source itself may just have been evicted to make room for the copy: then its tokens are in place.
        if source != target and num_tokens:
            self._copies.append(BlockCopy(source, target, num_tokens))

    def drain_copies(self) -> list[BlockCopy]:
        """The copies queued since the last call, in order."""
        copies, self._copies = self._copies, []
        return copies

    def _make_free(self, count: int) -> None:
        missing = count - self._pool.num_free
        if missing > 0:
            self._pins.release_expired()
            tokens, blocks = self._tree.evict(missing)
            self._stats.evicted_tokens += tokens
            self._stats.evicted_blocks += blocks
