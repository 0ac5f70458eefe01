"""Replays a trace through the real cache: every block of the trace is one token in a cache of block size 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixkv.cache import EvictionPolicy, OutOfBlocks, PrefixCache
from radixkv.observe.simulate.trace import Trace, TracedRequest

# Stands for the last token of a prompt, which is always computed, so that all blocks of the trace can be hits.
_LAST_TOKEN = np.array([2**31 - 1], dtype=np.int32)


class ReplayClock:
    """The trace's time."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def make_cache(num_blocks: int, policy: EvictionPolicy) -> tuple[PrefixCache, ReplayClock]:
    """A cache to replay a trace through, and its clock."""
    clock = ReplayClock()
    return PrefixCache(num_blocks, 1, policy, clock=clock), clock


def replay(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> Iterator[int]:
    """Replay the requests of a trace one after another, each complete at once; yields the number of its blocks that hit.

    The clock is the trace's. A request with more blocks than the cache has leaves nothing cached: an engine would refuse it.
    """
    cache, clock = make_cache(num_blocks, policy)
    for request in trace.requests:
        yield serve(cache, clock, request)


def serve(cache: PrefixCache, clock: ReplayClock, request: TracedRequest) -> int:
    """Replay one request; returns how many of its blocks hit."""
    clock.seconds = request.time
    # The lowest request is the most urgent, and the cache keeps the highest priority longest: as the engine opens it.
    table = cache.open(np.concatenate([request.prompt, _LAST_TOKEN]), priority=-request.priority)
    num_hits = table.num_cached_tokens
    tokens = np.concatenate([request.prompt, request.output])
    try:
        cache.reserve(table, len(tokens))
    except OutOfBlocks:
        cache.abort(table)
    else:
        cache.append(table, tokens[num_hits:])
        cache.close(table)
    return num_hits
