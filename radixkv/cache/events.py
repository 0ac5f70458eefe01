"""What happens in the cache, as a sequence of events.

Whoever follows them from the beginning knows what the tree holds: a router that sends a request to where its prefix is, or a
second tier that keeps what goes. Blocks are named by their hashes (`block_hash`), so a name stands for all tokens before it
too, and for the namespace.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one prefix became known.

    Attributes:
        block_hashes: one a block, in order.
        parent_hash: of the block before the first; None where that begins a prefix.
        token_ids: of all blocks. Only the last block may be partly filled; it is gone before another takes its place.
        namespace_hash: `namespace_hash` of the name, which is not told.
        medium: where the blocks are.
    """

    block_hashes: tuple[int, ...]
    parent_hash: int | None
    token_ids: tuple[int, ...]
    block_size: int
    namespace_hash: int
    medium: str


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks are no longer known."""

    block_hashes: tuple[int, ...]
    namespace_hash: int
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is known any more."""


CacheEvent = BlocksStored | BlocksRemoved | AllCleared


class EventLog:
    """The events that nobody has taken yet. Iterating takes them, one by one, until none is left.

    Args:
        max_events: more are not kept: the oldest are dropped.
        medium: where the cache's blocks are.

    Attributes:
        num_dropped: events that were dropped. Whoever finds it grown must begin anew, from a cleared cache.
    """

    def __init__(self, max_events: int = 100_000, medium: str = "CPU") -> None:
        self.medium = medium
        self.num_dropped = 0
        self._events: deque[CacheEvent] = deque(maxlen=max_events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: CacheEvent) -> None:
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def __iter__(self) -> Iterator[CacheEvent]:
        while self._events:
            yield self._events.popleft()

    def take(self, count: int | None = None) -> list[CacheEvent]:
        """The next events, all of them or so many at most."""
        return list(itertools.islice(self, count))
