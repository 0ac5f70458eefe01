"""The cache's counters."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class CacheStats:
    """Counters since the cache was made.

    ``queried_tokens`` = ``reused_tokens`` + ``computed_tokens`` + ``abandoned_tokens`` + what live sequences have yet to
    compute of their prompts; `PrefixCache.check` verifies it. A preempted sequence that resumes is a query of its own.
    """

    opened_tables: int = 0
    queried_tokens: int = 0
    reused_tokens: int = 0
    computed_tokens: int = 0
    abandoned_tokens: int = 0  # prompt tokens of sequences that ended before computing them
    forked_tables: int = 0
    copied_blocks: int = 0
    deduplicated_blocks: int = 0  # computed, and found to be cached already
    evicted_tokens: int = 0
    evicted_blocks: int = 0
