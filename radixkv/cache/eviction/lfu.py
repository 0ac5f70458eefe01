"""Least frequently used first, with ageing (LFU-DA: Arlitt, Cherkasova, Dilley, Friedrich and Jin 2000)."""

from __future__ import annotations

from collections.abc import Collection

from radixkv.cache.eviction.policy import EvictableLeaf
from radixkv.cache.lazy_heap import LazyHeap


class LFU:
    """Least frequently used first.

    A leaf's score is its uses on top of the score of the last evicted leaf, so that a leaf used often long ago, whose score
    no longer changes, is overtaken in time.
    """

    def __init__(self) -> None:
        self._heap = LazyHeap[EvictableLeaf]()
        self._age = 0.0

    def add(self, leaf: EvictableLeaf) -> None:
        self._heap.push(leaf, self._age + leaf.uses, leaf.last_use)

    def remove(self, leaf: EvictableLeaf) -> None:
        self._heap.remove(leaf)

    def next_leaf(self) -> EvictableLeaf:
        self._age, leaf = self._heap.first()
        return leaf

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._heap.items()
