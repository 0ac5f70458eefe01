"""Least recently used first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection

from radixkv.cache.eviction.policy import EvictableLeaf
from radixkv.cache.lazy_heap import LazyHeap


class LRU:
    """Least recently used first.

    Most leaves are added at the end of a sequence, in the order of their last use. These are kept in a queue, where every
    operation takes the same time whether there are ten leaves or a million. The others, inner nodes that became leaves when
    their children were evicted, are kept in a heap.
    """

    def __init__(self) -> None:
        self._queue: OrderedDict[EvictableLeaf, None] = OrderedDict()
        self._newest = 0.0  # no leaf of the queue was used later; stays when the last one is removed
        self._late = LazyHeap[EvictableLeaf]()
        self._num_late = 0  # length of the heap, without a call

    def __len__(self) -> int:
        return len(self._queue) + self._num_late

    def add(self, leaf: EvictableLeaf) -> None:
        if leaf.last_use >= self._newest or not self._queue:
            self._newest = leaf.last_use
            self._queue[leaf] = None
        else:
            self._late.push(leaf, leaf.last_use)
            self._num_late += 1

    def remove(self, leaf: EvictableLeaf) -> None:
        if leaf in self._queue:
            del self._queue[leaf]
        else:
            self._late.remove(leaf)
            self._num_late -= 1

    def next_leaf(self) -> EvictableLeaf:
        if not self._num_late:
            return next(iter(self._queue))
        last_use, late = self._late.first()
        if not self._queue:
            return late
        oldest = next(iter(self._queue))
        return late if last_use < oldest.last_use else oldest

    def newest(self) -> EvictableLeaf:
        """The leaf added last: the other end of `next_leaf`'s order, leaves in the heap aside."""
        return next(reversed(self._queue)) if self._queue else self.next_leaf()

    def leaves(self) -> Collection[EvictableLeaf]:
        return [*self._queue, *self._late.items()]
