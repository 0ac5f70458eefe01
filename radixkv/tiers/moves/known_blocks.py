"""Which blocks were recently put into tiers, so that they are not copied out of the pool again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from weakref import WeakValueDictionary

from radixkv.namespaces import namespace_group


class _Group:
    """A group of namespaces until it is cleared."""

    __slots__ = ("__weakref__", "is_cleared")

    def __init__(self) -> None:
        self.is_cleared = False


class KnownBlocks:
    """The latest blocks by their hashes in the tree (`radixkv.cache.block_hash`); a collision only leaves one unwritten.

    Args:
        capacity: blocks of the smallest tier, which forgets a block once this many others are put after it.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._blocks: OrderedDict[int, _Group] = OrderedDict()  # by hash, oldest first; also of groups that are cleared
        self._groups: WeakValueDictionary[str, _Group] = WeakValueDictionary()  # those that are not

    def __contains__(self, block_hash: int) -> bool:
        group = self._blocks.get(block_hash)
        return group is not None and not group.is_cleared

    def add(self, hashes: Iterable[int], namespace: str) -> None:
        """Blocks of a namespace were put now."""
        group = self._groups.setdefault(namespace_group(namespace), _Group())
        for block_hash in hashes:
            self._blocks[block_hash] = group
            self._blocks.move_to_end(block_hash)
        while len(self._blocks) > self._capacity:
            self._blocks.popitem(last=False)

    def discard(self, hashes: Iterable[int]) -> None:
        """The blocks were computed again, so tiers may have lost them."""
        for block_hash in hashes:
            self._blocks.pop(block_hash, None)

    def lost(self, block_hash: int) -> None:
        """Tiers do not have the block: those put before it may be gone as well."""
        if block_hash in self:
            while self._blocks.popitem(last=False)[0] != block_hash:
                pass

    def clear_group(self, name: str) -> None:
        """Forget the blocks of one group of namespaces, in a time that does not depend on how many are known."""
        group = self._groups.pop(name, None)
        if group is not None:
            group.is_cleared = True

    def clear(self) -> None:
        """Forget all blocks."""
        self._blocks.clear()
