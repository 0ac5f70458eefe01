"""The counters of a store."""

from __future__ import annotations

import threading
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Totals since a store was opened.

    Attributes:
        hit_blocks: blocks that `Tier.get_many` returned.
        missed_blocks: blocks that it was asked for and did not return, for whatever reason.
        read_bytes: of the blocks returned.
        read_seconds: spent in `Tier.get_many`.
        written_blocks: blocks that reached the medium.
        written_bytes: of those.
        write_seconds: spent writing them, in the background.
        dropped_blocks: blocks put that were not written: the queue was full, or writing failed.
        corrupt_blocks: blocks that were there with other bytes than were put.
        evicted_blocks: blocks that made room for others.
        errors: calls in which the medium failed.
    """

    hit_blocks: int = 0
    missed_blocks: int = 0
    read_bytes: int = 0
    read_seconds: float = 0.0
    written_blocks: int = 0
    written_bytes: int = 0
    write_seconds: float = 0.0
    dropped_blocks: int = 0
    corrupt_blocks: int = 0
    evicted_blocks: int = 0
    errors: int = 0


class StoreCounters:
    """Adds up `StoreStats` from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals = asdict(StoreStats())

    def add(self, **amounts: float) -> None:
        """Add to the totals, by the names of `StoreStats`."""
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def add_read(self, num_hits: int, num_asked: int, block_bytes: int, seconds: float) -> None:
        """Count a call of `Tier.get_many`, which returned some of the blocks that it was asked for."""
        self.add(
            hit_blocks=num_hits,
            missed_blocks=num_asked - num_hits,
            read_bytes=num_hits * block_bytes,
            read_seconds=seconds,
        )

    def read(self) -> StoreStats:
        """The totals now."""
        with self._lock:
            return StoreStats(**self._totals)


@dataclass(frozen=True, slots=True)
class TierTotals:
    """What has happened below the pool.

    Attributes:
        tiers: the medium and the counters of each, in order.
        loads: prefixes whose loading was begun.
        loads_given_up: those of them that took longer than computing would have.
        loads_not_worth_it: prefixes that were there, but were computed because that is faster.
        dropped_blocks: blocks that were not written because too many waited to be.
    """

    tiers: tuple[tuple[str, StoreStats], ...]
    loads: int
    loads_given_up: int
    loads_not_worth_it: int
    dropped_blocks: int
