"""Where block tables get their blocks: free ones first, then what eviction frees; and the copies that must fill them."""

from __future__ import annotations

from dataclasses import dataclass

from radixkv.cache.block_pool import BlockIds, BlockPool
from radixkv.cache.errors import OutOfBlocks
from radixkv.cache.evicted import EvictedPrefixes
from radixkv.cache.pin import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.stats import CacheStats


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The first ``num_tokens`` slots of block ``source`` are to be copied into block ``target``."""

    source: int
    target: int
    num_tokens: int


class BlockStore:
    """The blocks of one cache, as its block tables use them.

    Attributes:
        pool: counts the owners of each block.
        tree: holds the cached prefixes; its leaves are evicted when no block is free.
        pins: expired ones are released whenever available blocks are counted, so before anything is evicted or refused.
        block_size: tokens per block.
        evicted: the memory of evicted prefixes; None: there is none.
        stats: where everything is counted.
    """

    __slots__ = ("_copies", "block_size", "evicted", "pins", "pool", "stats", "tree")

    def __init__(
        self, pool: BlockPool, tree: RadixTree, pins: Pins, block_size: int, evicted: EvictedPrefixes | None
    ) -> None:
        self.pool = pool
        self.tree = tree
        self.pins = pins
        self.block_size = block_size
        self.evicted = evicted
        self.stats = CacheStats()
        self._copies: list[BlockCopy] = []

    @property
    def num_available(self) -> int:
        """Blocks that are free or could be freed."""
        return self.pool.num_free + self.num_evictable

    @property
    def num_evictable(self) -> int:
        """Blocks that only the tree owns, those of expired pins included."""
        self.pins.release_expired()
        return self.tree.num_evictable_blocks

    def require(self, count: int) -> None:
        """Raise OutOfBlocks unless ``count`` blocks are available; allocates none."""
        if count > self.num_available:
            raise OutOfBlocks(count, self.pool.num_free, self.tree.num_evictable_blocks)

    def allocate(self, count: int, after: int | None, *, low: bool = False) -> BlockIds:
        """`BlockPool.allocate`, after evicting as many blocks as are not free.

        The caller has checked with `require` that enough are available.
        """
        self._make_free(count)
        return self.pool.allocate(count, after, low=low)

    def allocate_one(self, after: int | None) -> int:
        """`allocate` of one block, without an array."""
        self._make_free(1)
        return self.pool.allocate_one(after)

    def queue_copy(self, source: int, target: int, num_tokens: int) -> None:
        """Have the first ``num_tokens`` slots of ``source`` copied into ``target``."""
        self.stats.copied_blocks += 1
        # The source itself may have been evicted to make room, and be the target: its tokens are then already in place.
        if source != target and num_tokens:
            self._copies.append(BlockCopy(source, target, num_tokens))

    @property
    def copy_targets(self) -> set[int]:
        """The blocks into which queued copies will be written."""
        return {copy.target for copy in self._copies}

    def drain_copies(self) -> list[BlockCopy]:
        """The copies queued since the last call, in order."""
        copies, self._copies = self._copies, []
        return copies

    def _make_free(self, count: int) -> None:
        missing = count - self.pool.num_free
        if missing > 0:
            self.stats.evicted_tokens += self.tree.evict(missing)
            self.stats.evicted_blocks += missing
