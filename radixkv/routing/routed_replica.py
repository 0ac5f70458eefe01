"""A router's state of one replica: which requests it has to compute, and which blocks it will then hold."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

# Seconds after which what was sent to a replica counts half.
_HALF_LIFE = 300.0


@dataclass(eq=False, slots=True)
class Placement:
    """A request and where it was sent.

    Attributes:
        replica: the name.
        state: of the replica; once that is removed, another one may have its name.
        block_hashes: of the whole blocks of its prompt that the replica will hold; empty where it caches none of them.
        num_tokens: tokens of the prompt that the replica was expected to compute, because it did not hold them.
        first_expected: the first of its blocks that is expected because of this request; those before it are held, or
            expected because of others.
        prefilled: whether it has its first token, or has ended.
    """

    replica: str
    state: RoutedReplica
    block_hashes: Sequence[int]
    num_tokens: int
    first_expected: int
    prefilled: bool = False


@dataclass(eq=False, slots=True)
class RoutedReplica:
    """What is known of one replica.

    Attributes:
        number: its bit in the index.
        caches: whether it keeps what it computes.
        queued: tokens that are known to have been sent to it and are not computed yet.
        waiting: the requests they belong to, those that other routers sent included, in the order in which they were sent.
        decoding: requests that have their first token and have not ended, those that other routers sent included.
        others: the requests that other routers sent and that have not ended, by the replica's names for them.
        num_others_blocks: the whole blocks of the prompts of `others`.
        progressed: when the first of `waiting` began to be computed, at the earliest.
        seconds_per_token: of prefill, as it reported last; None: it has not measured it yet.
        sent_tokens: tokens sent to be computed, of which older ones count less; as of `sent_at`.
        expected: hashes of the blocks that it will hold, or holds while no event has said so.
    """

    number: int
    caches: bool
    queued: int = 0
    waiting: dict[Placement, None] = field(default_factory=dict)
    decoding: set[Placement] = field(default_factory=set)
    others: dict[object, Placement] = field(default_factory=dict)
    num_others_blocks: int = 0
    progressed: float = 0.0
    seconds_per_token: float | None = None
    sent_tokens: float = 0.0
    sent_at: float = 0.0
    expected: set[int] = field(default_factory=set)

    def enqueue(self, placement: Placement, now: float) -> None:
        """A request was sent to it."""
        if not self.waiting:
            self.progressed = now
        self.waiting[placement] = None
        self.queued += placement.num_tokens
        self.sent_tokens = self.recently_sent(now) + placement.num_tokens
        self.sent_at = now
        self.expected.update(placement.block_hashes[placement.first_expected :])

    def dequeue(self, placement: Placement, now: float, *, computed: bool) -> None:
        """A request that waited no longer does."""
        if computed or placement is next(iter(self.waiting)):
            self.progressed = now
        del self.waiting[placement]
        self.queued -= placement.num_tokens

    def seconds_left(self, now: float, seconds_per_token: float) -> float:
        """Seconds until all that waits is computed, less the first prompt's progress; only while a prompt waits."""
        done, head = now - self.progressed, next(iter(self.waiting)).num_tokens * seconds_per_token
        return self.queued * seconds_per_token - (done if done < head else head)

    def depth(self, block_hashes: Sequence[int], held: Sequence[tuple[int, int]]) -> int:
        """How many of a prompt's leading blocks it holds or will hold.

        Args:
            block_hashes: of the prompt.
            held: from `BlockIndex.hits`, of the same prompt.
        """
        return self.expected_depth(
            block_hashes, max((depth for mask, depth in held if mask >> self.number & 1), default=0)
        )

    def expected_depth(self, block_hashes: Sequence[int], held: int) -> int:
        """How many of a prompt's leading blocks it will hold, given how many it holds."""
        low, high = held - 1, len(block_hashes)
        probe = held
        while high - low > 1:
            if block_hashes[probe] in self.expected:
                low = probe
            else:
                high = probe
            probe = (low + high) // 2
        return low + 1

    def awaited_depth(self, block_hashes: Sequence[int], first: int, end: int) -> int:
        """How many leading blocks, ``end`` at most, a request that waits has in common with a prompt; at least ``first``."""
        depth = first
        for placement in self.waiting:
            others = placement.block_hashes
            if depth < min(end, len(others)) and others[depth] == block_hashes[depth]:
                # A block's hash covers all before it: what two prompts have in common is a prefix.
                until = range(min(end, len(others)))
                depth = bisect_left(until, True, lo=depth + 1, key=lambda at: others[at] != block_hashes[at])
        return depth

    def clear(self) -> None:
        """The replica holds nothing any more, and prompts that wait are computed from their first blocks on."""
        self.expected.clear()
        for placement in self.waiting:
            placement.first_expected = 0
            self.expected.update(placement.block_hashes)

    def recently_sent(self, now: float) -> float:
        """Tokens that it was sent, of which older ones count less."""
        return self.sent_tokens * math.pow(2.0, (self.sent_at - now) / _HALF_LIFE)
