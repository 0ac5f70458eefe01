"""Which blocks were recently put into tiers, so that they are not copied out of the pool again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class KnownBlocks:
    """The latest blocks by their hashes in the tree (`radixkv.cache.block_hash`); a collision only leaves one unwritten.

    Args:
        capacity: blocks of the smallest tier, which forgets a block once this many others are put after it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._hashes: OrderedDict[int, None] = OrderedDict()  # oldest first

    def __contains__(self, block_hash: int) -> bool:
        return block_hash in self._hashes

    def add(self, hashes: Iterable[int]) -> None:
        """The blocks were put now."""
        for block_hash in hashes:
            self._hashes[block_hash] = None
            self._hashes.move_to_end(block_hash)
        while len(self._hashes) > self._capacity:
            self._hashes.popitem(last=False)

    def discard(self, hashes: Iterable[int]) -> None:
        """The blocks were computed again, so tiers may have lost them."""
        for block_hash in hashes:
            self._hashes.pop(block_hash, None)

    def lost(self, block_hash: int) -> None:
        """Tiers do not have the block: those put before it may be gone as well."""
        if block_hash in self._hashes:
            while self._hashes.popitem(last=False)[0] != block_hash:
                pass

    def clear(self) -> None:
        """Forget all blocks."""
        self._hashes.clear()
