"""A heap of leaves by score."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Collection

from radixkv.cache.eviction.policy import EvictableLeaf

_Entry = tuple[float, float, int, EvictableLeaf]


class LeafHeap:
    """The leaf with the lowest score first; of equal scores the least recently used, then the first added.

    Entries of removed leaves stay in the heap until they reach its top, and are dropped when they are the majority.
    """

    def __init__(self) -> None:
        self._entry_of: dict[EvictableLeaf, _Entry] = {}
        self._heap: list[_Entry] = []
        self._numbers = itertools.count()

    def push(self, score: float, leaf: EvictableLeaf) -> None:
        entry = (score, leaf.last_use, next(self._numbers), leaf)
        self._entry_of[leaf] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, leaf: EvictableLeaf) -> None:
        del self._entry_of[leaf]
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, EvictableLeaf]:
        """The lowest score and its leaf; there must be one."""
        while self._entry_of.get(self._heap[0][3]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0], self._heap[0][3]

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._entry_of.keys()
