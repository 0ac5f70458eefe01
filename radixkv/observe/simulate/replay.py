"""Replays a trace through the real cache: every block of the trace is one token in a cache of block size 1."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from radixkv.cache import EvictionPolicy, OutOfBlocks, PrefixCache
from radixkv.observe.simulate.trace import Trace, TracedRequest

# Stands for the last token of a prompt, which is always computed, so that all blocks of the trace can be hits.
_LAST_TOKEN = np.array([2**31 - 1], dtype=np.int32)


def replay(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> Iterator[int]:
    """Replay the requests of a trace one after another, each complete at once; yields the number of its blocks that hit.

    The clock is the trace's. A request with more blocks than the cache has leaves nothing cached: an engine would refuse it.
    """
    now = 0.0

    def clock() -> float:
        return now

    cache = PrefixCache(num_blocks, 1, policy, clock=clock)
    for request in trace.requests:
        now = request.time
        yield _serve(cache, request)


def _serve(cache: PrefixCache, request: TracedRequest) -> int:
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
