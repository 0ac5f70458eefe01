"""Blocks for sequences that grow: free ones first, then what eviction frees; and the copies that must fill them."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.block_pool import BlockIds, BlockPool
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
        tree: whose leaves are evicted when none is free.
        pins: that are released when they have expired, before anything is evicted or refused.
        stats: where evictions and copies are counted.
    """

    def __init__(self, pool: BlockPool, tree: RadixTree, pins: Pins, stats: CacheStats) -> None:
        self._pool = pool
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

    def allocate(self, count: int, after: int | None) -> BlockIds:
        """Blocks of the caller's own, following ``after`` where they can.

        Raises:
            OutOfBlocks: they cannot be had.
        """
        self._make_free(count)
        return self._pool.allocate(count, after=after)

    def allocate_one(self, after: int | None) -> int:
        """`allocate` of one block, without an array."""
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
