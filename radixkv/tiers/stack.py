"""Several tiers as one, the nearest first: blocks that one lacks are looked for in the next; writes go to all of them.

Nothing that a tier does raises here. A tier that fails, or returns an impossible answer, counts as empty, and one whose
counters cannot be read keeps the last ones; each method that fails is logged once until it works again.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock, Thread

from radixkv.cache.arguments import is_whole
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.stats import StoreStats
from radixkv.tiers.tier import BlockBytes, Borrower, PartlyFilledKeeper, RecencyOrdered, Tier

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Span:
    """Consecutive blocks of a prefix that one tier has.

    Attributes:
        tier: the tier's index.
        start, stop: the range of the blocks' indices.
    """

    tier: int
    start: int
    stop: int


class TierStack:
    """Tiers in the order in which they are asked. Any thread may call.

    Args:
        tiers: the nearest first, at least one.

    Attributes:
        media: the tiers' media, in order.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self.media = [tier.medium for tier in tiers]
        self._tiers = list(tiers)
        self._failing: set[tuple[int, str]] = set()  # tiers, and their methods that failed last
        self._stats = [StoreStats()] * len(tiers)
        # The tiers that `flush` does not wait for. Used by the thread that writes.
        self._behind = [False] * len(tiers)
        # How often each namespace was cleared; under None, everything. Blocks read or queued before that are not put later.
        self._num_clears: Counter[bytes | None] = Counter()
        self._put_lock = Lock()

    @property
    def keeps_partly_filled(self) -> bool:
        """Whether any tier keeps partly filled blocks."""
        return any(isinstance(tier, PartlyFilledKeeper) for tier in self._tiers)

    @property
    def stats(self) -> tuple[StoreStats, ...]:
        """The counters of each tier."""
        for index, tier in enumerate(self._tiers):
            with self._guarded(index, "stats", "its last counters are reported"):
                self._stats[index] = _checked_stats(tier.stats)
        return tuple(self._stats)

    def num_clears(self, namespace: bytes) -> int:
        """How often the namespace was cleared, alone or with all others."""
        return self._num_clears[namespace] + self._num_clears[None]

    def find(self, keys: Sequence[BlockKey], start: int = 0) -> list[Span]:
        """Where the blocks from index ``start`` on are, according to the tiers, up to the first gap."""
        spans = []
        for index, tier in enumerate(self._tiers):
            if start == len(keys):
                break
            found = 0
            with self._guarded(index, "contains_prefix"):
                found = _checked_count("contains_prefix", tier.contains_prefix(keys[start:]), len(keys) - start)
            if found:
                spans.append(Span(index, start, start + found))
                start += found
        return spans

    def find_first(self, keys: Sequence[BlockKey], num_tiers: int) -> tuple[int, BlockKey] | None:
        """The first of some keys of partly filled blocks that one of the nearest tiers has, as far as is known.

        Returns:
            The tier's index and the key; None: none of these tiers has any.
        """
        found: tuple[int, BlockKey] | None = None
        for index, tier in enumerate(self._tiers[:num_tiers]):
            if isinstance(tier, PartlyFilledKeeper) and keys:
                with self._guarded(index, "first_present"):
                    first = tier.first_present(keys)
                    if first is not None:
                        row = _checked_count("first_present", first, len(keys) - 1)
                        found, keys = (index, keys[row]), keys[:row]
        return found

    def read(self, span: Span, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        """Read a span's blocks into rows, up to the first that is missing, and put them into the nearer tiers.

        Args:
            span: from `find`, or a part of one.
            keys: of the whole prefix.
            out: one row for each block of the span.

        Returns:
            How many blocks were read.
        """
        wanted = keys[span.start : span.stop]
        num_clears = self.num_clears(wanted[0].namespace)
        found = 0
        with self._guarded(span.tier, "get_many"):
            found = _checked_count("get_many", self._tiers[span.tier].get_many(wanted, out), len(wanted))
        if found:
            self._put(range(span.tier), wanted[:found], out[:found], num_clears, lent=False)
        return found

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """The prefix was used now; see `RecencyOrdered`."""
        for index, tier in enumerate(self._tiers):
            if isinstance(tier, RecencyOrdered):
                with self._guarded(index, "mark_used", "may evict what was used last"):
                    tier.mark_used(_for_tier(tier, prefix))

    def write(self, keys: Sequence[BlockKey], blocks: BlockBytes, num_clears: int) -> None:
        """Put blocks into all tiers, unless their namespace was cleared since `num_clears` returned this number.

        The blocks must not change until `flush` has returned True: tiers may write them straight from this memory.
        """
        for index, is_behind in enumerate(self._behind):
            if is_behind:
                self._flush(index, 0.0)
        self._put(range(len(self._tiers)), keys, blocks, num_clears, lent=True)

    def flush(self, timeout: float) -> bool:
        """Wait until all tiers have what was put; False if ``timeout`` seconds were not enough for one of them.

        A tier that is late is not waited for again until it has caught up.
        """
        finished = [self._flush(index, 0.0 if behind else timeout) for index, behind in enumerate(self._behind)]
        return all(finished)

    def clear(self, namespace: bytes | None) -> None:
        """Forget one namespace (`BlockKey.namespace`), or everything, in all tiers. Waits for a put in progress."""
        with self._put_lock:
            self._num_clears[namespace] += 1
            for index, tier in enumerate(self._tiers):
                with self._guarded(index, "clear", "may still have what was cleared"):
                    tier.clear(namespace)

    def close(self, timeout: float) -> bool:
        """Close all tiers; one whose medium hangs is left behind, in a thread that ends with the process.

        Args:
            timeout: seconds for all of them.

        Returns:
            False if the time was not enough.
        """
        threads = [
            Thread(target=self._close, args=(index,), name=f"radixkv-close-{medium}", daemon=True)
            for index, medium in enumerate(self.media)
        ]
        for thread in threads:
            thread.start()
        deadline = time.monotonic() + timeout
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)

    def _close(self, index: int) -> None:
        with self._guarded(index, "close", "may not be closed"):
            self._tiers[index].close()

    def _flush(self, index: int, timeout: float) -> bool:
        with self._guarded(index, "flush", "may not have written all"):
            self._behind[index] = not self._tiers[index].flush(timeout)
            return not self._behind[index]
        return False

    def _put(
        self, indices: range, keys: Sequence[BlockKey], blocks: BlockBytes, num_clears: int, *, lent: bool
    ) -> None:
        if not indices:
            return
        with self._put_lock:
            if self.num_clears(keys[0].namespace) != num_clears:
                return
            blocks = blocks.view()
            blocks.flags.writeable = False
            for index in indices:
                tier = self._tiers[index]
                kept = _for_tier(tier, keys)
                if not kept:
                    continue
                if lent and isinstance(tier, Borrower):
                    method, put = "borrow_many", tier.borrow_many
                else:
                    method, put = "put_many", tier.put_many
                with self._guarded(index, method, "does not keep what is put"):
                    put(kept, blocks[: len(kept)])

    @contextmanager
    def _guarded(self, index: int, method: str, instead: str = "is treated as empty") -> Iterator[None]:
        """Treat a tier that raises, which it must not, as having done nothing; ``instead`` says so in the log."""
        try:
            yield
        except Exception as error:
            if (index, method) not in self._failing:
                self._failing.add((index, method))
                _log.warning("the %s tier failed in %s, and %s: %r", self.media[index], method, instead, error)
        else:
            self._failing.discard((index, method))


def _for_tier(tier: Tier, keys: Sequence[BlockKey]) -> Sequence[BlockKey]:
    """The keys without the last one if it is of a partly filled block, which the tier does not keep."""
    return keys if not keys or keys[-1].is_whole or isinstance(tier, PartlyFilledKeeper) else keys[:-1]


def _checked_count(method: str, count: int, most: int) -> int:
    """A tier's answer as an int; an error unless it is a whole number from 0 to ``most``: rows beyond are undefined."""
    expected = f"{method}: expected a whole number from 0 to {most}, got {count!r:.80}"
    if not is_whole(count):
        raise TypeError(expected)
    if not 0 <= count <= most:
        raise ValueError(expected)
    return int(count)


def _checked_stats(stats: StoreStats) -> StoreStats:
    """A tier's counters; an error if they are something else."""
    if not isinstance(stats, StoreStats):
        raise TypeError(f"stats: expected StoreStats, got {stats!r:.80}")
    return stats
