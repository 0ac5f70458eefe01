"""Which leaf goes first when blocks are needed.

A policy keeps an index of the leaves that may go. The cache tells it of each that comes and goes, so finding the next
one never walks over the leaves.
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Collection
from typing import Protocol


class EvictableLeaf(Protocol):
    """What a policy may know of a leaf. It does not change while the leaf is in the index, but for ``num_blocks``."""

    last_use: int

    @property
    def num_blocks(self) -> int: ...


class EvictionPolicy(Protocol):
    """An index of evictable leaves."""

    def add(self, leaf: EvictableLeaf) -> None:
        """``leaf`` may be evicted from now on; it is not in the index."""

    def remove(self, leaf: EvictableLeaf) -> None:
        """``leaf``, which is in the index, is in use again or gone."""

    def next_leaf(self) -> EvictableLeaf:
        """The leaf that should give up blocks first; it stays in the index, which is not empty."""

    def leaves(self) -> Collection[EvictableLeaf]:
        """Every leaf in the index, in no order."""


class LRU:
    """Least recently used first.

    Leaves mostly come in the order of their last use: they are let go when a sequence ends. These wait in a queue, where
    coming, going and being next cost the same whether there are ten or a million. The others, inner nodes that became
    leaves when what was below them went, wait in a heap, whose outdated entries are skipped, and dropped when they are
    the most of it.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[EvictableLeaf, None] = OrderedDict()
        self._newest = 0  # last use of the queue's last leaf
        self._entry_of: dict[EvictableLeaf, tuple[int, int, EvictableLeaf]] = {}
        self._heap: list[tuple[int, int, EvictableLeaf]] = []
        self._numbers = itertools.count()

    def add(self, leaf: EvictableLeaf) -> None:
        if leaf.last_use >= self._newest or not self._queue:
            self._newest = leaf.last_use
            self._queue[leaf] = None
            return
        entry = (leaf.last_use, next(self._numbers), leaf)
        self._entry_of[leaf] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, leaf: EvictableLeaf) -> None:
        if leaf in self._queue:
            del self._queue[leaf]
            return
        del self._entry_of[leaf]
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def next_leaf(self) -> EvictableLeaf:
        while self._heap and self._entry_of.get(self._heap[0][2]) is not self._heap[0]:
            heapq.heappop(self._heap)
        if not self._queue:
            return self._heap[0][2]
        oldest = next(iter(self._queue))
        return self._heap[0][2] if self._heap and self._heap[0][0] < oldest.last_use else oldest

    def leaves(self) -> Collection[EvictableLeaf]:
        return [*self._queue, *self._entry_of]
