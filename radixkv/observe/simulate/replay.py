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

    A request with more blocks than the cache has leaves nothing cached, as an engine would refuse it.
    """
    now = 0.0

    def clock() -> float:
        return now

    cache = PrefixCache(num_blocks, 1, policy, clock=clock)
    for request in trace.requests:
        now = request.time
        yield _serve(cache, request)


def hit_rate(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> float:
    """Blocks hit to blocks asked for."""
    return sum(replay(trace, num_blocks, policy)) / max(1, trace.num_asked_blocks)


def _serve(cache: PrefixCache, request: TracedRequest) -> int:
    table = cache.open(np.concatenate([request.prompt, _LAST_TOKEN]))
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
