"""Lowest retention priority first, until a leaf has been idle for too long.

As with TensorRT-LLM's retention configurations (a priority and a duration for a range of tokens).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from radixkv.cache.arguments import is_number
from radixkv.cache.errors import InvalidArgumentError
from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.policy import EvictableLeaf


class PriorityTTL:
    """Leaves of the LOWEST priority are evicted first, the least recently used among them.

    Sequences get their priority from `PrefixCache.open`. A leaf that was not used for ``ttl`` seconds loses its priority
    and is evicted before all others.

    Args:
        ttl: seconds; None: a priority is never lost.

    Raises:
        InvalidArgumentError: ``ttl`` is not above 0.
    """

    def __init__(self, ttl: float | None = 600.0) -> None:
        if ttl is not None and not (is_number(ttl) and ttl > 0):
            raise InvalidArgumentError(f"ttl: expected seconds above 0 or None, got {ttl!r}")
        self._ttl = ttl
        self._clock: Callable[[], float] = time.monotonic
        self._by_priority: dict[int, LRU] = {}

    def use_clock(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def add(self, leaf: EvictableLeaf) -> None:
        self._by_priority.setdefault(leaf.priority, LRU()).add(leaf)

    def remove(self, leaf: EvictableLeaf) -> None:
        queue = self._by_priority[leaf.priority]
        queue.remove(leaf)
        if not queue:
            del self._by_priority[leaf.priority]

    def next_leaf(self) -> EvictableLeaf:
        if self._ttl is not None:
            oldest = min((queue.next_leaf() for queue in self._by_priority.values()), key=lambda leaf: leaf.last_use)
            if self._clock() - oldest.last_use > self._ttl:
                return oldest
        return self._by_priority[min(self._by_priority)].next_leaf()

    def leaves(self) -> Collection[EvictableLeaf]:
        return [leaf for queue in self._by_priority.values() for leaf in queue.leaves()]
