"""A heap whose items can be removed from anywhere."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from typing import Generic, TypeVar

Item = TypeVar("Item")


class LazyHeap(Generic[Item]):
    """The item with the lowest score first; of equal scores the first by ``then``, then the first added.

    Entries of removed items stay in the heap until they reach its top, and are dropped when they are the majority.
    """

    def __init__(self) -> None:
        self._entry_of: dict[Item, tuple[float, float, int, Item]] = {}
        self._heap: list[tuple[float, float, int, Item]] = []
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._entry_of)

    def push(self, item: Item, score: float, then: float = 0.0) -> None:
        entry = (score, then, self._num_added, item)
        self._num_added += 1
        self._entry_of[item] = entry
        heapq.heappush(self._heap, entry)

    def remove(self, item: Item) -> None:
        del self._entry_of[item]
        if len(self._heap) > 2 * len(self._entry_of) + 64:
            self._heap = list(self._entry_of.values())
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Item]:
        """The lowest score and its item; there must be one."""
        while self._entry_of.get(self._heap[0][3]) is not self._heap[0]:
            heapq.heappop(self._heap)
        return self._heap[0][0], self._heap[0][3]

    def items(self) -> Collection[Item]:
        return self._entry_of.keys()
