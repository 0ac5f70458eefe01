"""Changes of the cache's contents, as a sequence of events.

Read from the beginning, they give the contents of the tree: to a router that sends a request to where its prefix is cached,
or to a second tier that keeps what is evicted. Blocks are named by their hashes (`block_hash`), so a name stands
for all tokens before the block too, and for the namespace.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from radixkv.cache.arguments import check_count
from radixkv.cache.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """Consecutive blocks of one prefix were cached.

    Attributes:
        block_hashes: one per block, in order.
        parent_hash: of the block before the first; None where the first begins a prefix.
        token_ids: of all blocks. Only the last block may be partly filled; it is removed before a fuller one is stored.
        block_size: tokens per block.
        namespace_hash: `namespace_hash` of the namespace, whose name is not published.
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
    """Blocks are no longer cached.

    Attributes:
        block_hashes, namespace_hash, medium: as in `BlocksStored`.
    """

    block_hashes: tuple[int, ...]
    namespace_hash: int
    medium: str


@dataclass(frozen=True, slots=True)
class AllCleared:
    """Nothing is cached any more."""


CacheEvent = BlocksStored | BlocksRemoved | AllCleared
"""What an `EventLog` holds."""


class EventLog:
    """A bounded queue of events. Iterating removes them one by one, oldest first, until the queue is empty.

    Args:
        max_events: the oldest events are dropped beyond this number.
        medium: where the cache's blocks are.

    Attributes:
        num_dropped: events that were dropped. When it grows, a consumer must begin anew, from a cleared cache.

    Raises:
        InvalidArgumentError: ``max_events`` is not a whole number from 1 to ``sys.maxsize``.
    """

    def __init__(self, max_events: int = 100_000, medium: str = "CPU") -> None:
        max_events = check_count("max_events", max_events, 1)
        if max_events > sys.maxsize:
            raise InvalidArgumentError(f"max_events: expected at most {sys.maxsize:,}, got {max_events}")
        self.medium = medium
        self.num_dropped = 0
        self._events: deque[CacheEvent] = deque(maxlen=max_events)

    def __len__(self) -> int:
        return len(self._events)

    def add(self, event: CacheEvent) -> None:
        """Append an event; the oldest is dropped where the log is full."""
        self.num_dropped += len(self._events) == self._events.maxlen
        self._events.append(event)

    def __iter__(self) -> Iterator[CacheEvent]:
        while self._events:
            yield self._events.popleft()

    def take(self, count: int | None = None) -> list[CacheEvent]:
        """Remove and return the oldest ``count`` events; None: all of them.

        Raises:
            InvalidArgumentError: ``count`` is neither a whole number of at least 0 nor None.
        """
        count = len(self) if count is None else min(check_count("count", count, 0), len(self))
        return [self._events.popleft() for _ in range(count)]
