"""What an engine is doing, as plain numbers that any thread may read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from radixkv.cache.stats import CacheStats
from radixkv.outputs import DraftCounts

if TYPE_CHECKING:
    from radixkv.engine.engine import Engine
    from radixkv.tiers.stats import TierTotals


class BatchSize(NamedTuple):
    """How much went through the model in one step."""

    num_sequences: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine between two steps.

    Attributes:
        num_running: requests with at least one running sequence.
        num_waiting: requests with none.
        num_preemptions, num_steps: since the engine was made.
        num_blocks: all blocks: free, evictable (only the cache has them) and in use.
        last_batch: the sequences and tokens of the latest step, drafted ones included.
        cache: the cache's own counters.
        drafts: drafted and accepted tokens by source, since the engine was made.
        tiers: what has happened below the pool; None where there are no tiers.
        num_queued_tokens: prompt tokens that are still to be computed. A waiting prompt counts with those that were not
            cached when it was last looked up.
        num_queued: groups of sequences with such tokens: those waiting, and those whose prompts are in progress.
        num_decoding: running groups whose prompts are computed.
        prefill_seconds_per_token: how long a prompt token takes, see `PrefillRate`; None: not known yet.
    """

    num_running: int
    num_waiting: int
    num_preemptions: int
    num_steps: int
    num_blocks: int
    num_free_blocks: int
    num_evictable_blocks: int
    last_batch: BatchSize
    cache: CacheStats
    drafts: Mapping[str, DraftCounts]
    tiers: TierTotals | None = None
    num_queued_tokens: int = 0
    num_queued: int = 0
    num_decoding: int = 0
    prefill_seconds_per_token: float | None = None

    @property
    def num_blocks_in_use(self) -> int:
        return self.num_blocks - self.num_free_blocks - self.num_evictable_blocks


# Fields for the present moment that are summed over the engines of a cluster; counts are, over all that it ever had.
SUMMED_GAUGES = (
    "num_running",
    "num_waiting",
    "num_blocks",
    "num_free_blocks",
    "num_evictable_blocks",
    "num_queued_tokens",
    "num_queued",
    "num_decoding",
)


def engine_stats(engine: Engine) -> EngineStats:
    """The numbers now; for the thread that owns the engine."""
    scheduler, cache = engine.scheduler, engine.cache
    num_running = len({group.request for group in scheduler.running})
    pending = [group.num_pending for group in scheduler.running]
    num_prefilling = sum(count > 1 for count in pending)
    num_queued_tokens = sum(count for count in pending if count > 1) + scheduler.waiting.num_uncached_tokens
    return EngineStats(
        num_running=num_running,
        num_waiting=engine.num_unfinished_requests - num_running,
        num_preemptions=scheduler.num_preemptions,
        num_steps=engine.num_steps,
        num_blocks=cache.num_blocks,
        num_free_blocks=cache.num_free_blocks,
        num_evictable_blocks=cache.num_evictable_blocks,
        last_batch=engine.last_batch,
        cache=cache.stats,
        tiers=None if engine.tiers is None else engine.tiers.totals,
        num_queued_tokens=num_queued_tokens,
        num_queued=num_prefilling + len(scheduler.waiting),
        num_decoding=len(pending) - num_prefilling,
        prefill_seconds_per_token=engine.prefill_rate.seconds_per_token,
        drafts={source: replace(counts) for source, counts in engine.draft_counts.items()},
    )
