"""What LRU would have hit in place of the policy in use, and how certain it is that LRU does better.

LRU hits an idle prefix exactly if fewer blocks than fit have been idle for a shorter time. So the shadow needs no tree: it
records how many blocks fell idle at each time, and forgets the oldest beyond as many as the cache really holds::

    fell idle at   12.0   12.9   13.1   14.6   15.0        a prefix idle since 13.1 is used again: LRU hits it
    blocks            -      -     30     12     41        one idle since 12.9: LRU has evicted it
                    forgotten      └─ as many as are cached ─┘
"""

from __future__ import annotations

import math
from collections import OrderedDict


class LRUShadow:
    """Follows idle blocks as `Adaptive` is notified of them.

    ``advantage`` compares the hits of both by the difference at each reuse, older ones counting less with each `fade`: the
    sum of the differences over the root of the sum of their squares, a standard score if all of them were chance.
    """

    def __init__(self) -> None:
        # What LRU holds: blocks by since when they are idle, oldest first while in order.
        self._idle: OrderedDict[float, int] = OrderedDict()
        self._in_order = True
        self._num_idle = 0
        self._num_cached = 0  # idle blocks that the cache really holds
        self._difference = 0.0
        self._squares = 0.0

    @property
    def advantage(self) -> float:
        """Standard deviations by which LRU hits more; negative where it hits less."""
        return self._difference / math.sqrt(self._squares) if self._squares else 0.0

    def begin(self, num_blocks: int, since: float) -> None:
        """Blocks are idle since this moment: usually now, earlier for what was pinned."""
        self._forget_excess()
        self._num_cached += num_blocks
        self._num_idle += num_blocks
        if since not in self._idle and self._idle and since < next(reversed(self._idle)):
            self._in_order = False
        self._idle[since] = self._idle.get(since, 0) + num_blocks

    def end(self, num_blocks: int, idle_since: float, evicted: bool) -> None:
        """Blocks are used again, or computed again because they were ``evicted``."""
        difference = self._take(num_blocks, idle_since)
        if not evicted:
            self._num_cached -= num_blocks
            difference -= num_blocks
        if difference:
            self._difference += difference
            self._squares += difference * difference

    def replace(self, num_blocks: int, idle_since: float) -> None:
        """Fuller blocks replace idle ones, under every policy."""
        self._num_cached -= num_blocks
        self._take(num_blocks, idle_since)

    def evict(self, num_blocks: int) -> None:
        """The cache gives up idle blocks; LRU gives up the oldest."""
        self._num_cached -= num_blocks
        self._forget_excess()

    def fade(self, share: float) -> None:
        """Let past comparisons count less by ``share``."""
        self._difference *= 1 - share
        self._squares *= 1 - share

    def _forget_excess(self) -> None:
        """Forget what LRU would have evicted by now.

        Not called when blocks are reused: all reuses of one request count before any of them pushes others out.
        """
        excess = self._num_idle - self._num_cached
        if excess > 0 and not self._in_order:
            self._idle, self._in_order = OrderedDict(sorted(self._idle.items())), True
        while excess > 0:
            excess -= self._take(excess, next(iter(self._idle)))

    def _take(self, num_blocks: int, idle_since: float) -> int:
        """Remove up to ``num_blocks`` of the blocks that LRU holds since ``idle_since``; returns how many."""
        held = self._idle.get(idle_since, 0)
        if not held:
            return 0
        num_blocks = min(num_blocks, held)
        if num_blocks == held:
            del self._idle[idle_since]
        else:
            self._idle[idle_since] = held - num_blocks
        self._num_idle -= num_blocks
        return num_blocks
