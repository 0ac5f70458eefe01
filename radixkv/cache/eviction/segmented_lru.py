"""Segmented LRU: leaves that were used again are protected (Karedla, Love and Wherry 1994)."""

from __future__ import annotations

from collections.abc import Collection

from radixkv.cache.arguments import is_number
from radixkv.cache.errors import InvalidArgumentError
from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.policy import EvictableLeaf


class SegmentedLRU:
    """Leaves that were used once are evicted first, in order of their last use; then those used again.

    So a scan of prompts that are never repeated evicts only other such prompts.

    Args:
        protected_share: the largest share of all leaves that is protected; beyond it the least recently used protected leaf
            returns to probation.

    Raises:
        InvalidArgumentError: ``protected_share`` is not between 0 and 1.
    """

    def __init__(self, protected_share: float = 0.8) -> None:
        if not (is_number(protected_share) and 0 < protected_share < 1):
            raise InvalidArgumentError(f"protected_share: expected a number between 0 and 1, got {protected_share!r}")
        self._protected_share = protected_share
        self._probation = LRU()
        self._protected = LRU()
        self._is_protected: dict[EvictableLeaf, bool] = {}

    def add(self, leaf: EvictableLeaf) -> None:
        protected = self._is_protected[leaf] = leaf.uses > 1
        (self._protected if protected else self._probation).add(leaf)
        while len(self._protected) > max(1, self._protected_share * len(self._is_protected)):
            oldest = self._protected.next_leaf()
            self._protected.remove(oldest)
            self._probation.add(oldest)
            self._is_protected[oldest] = False

    def remove(self, leaf: EvictableLeaf) -> None:
        (self._protected if self._is_protected.pop(leaf) else self._probation).remove(leaf)

    def next_leaf(self) -> EvictableLeaf:
        return self._probation.next_leaf() if len(self._probation) else self._protected.next_leaf()

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._is_protected.keys()
