"""Replays a trace through the real cache: every block of the trace is one token in a cache of block size 1."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from radixkv.cache import EvictionPolicy, OutOfBlocks, PrefixCache
from radixkv.observe.simulate.trace import LAST_TOKEN, Trace, TracedRequest


class Replay:
    """A cache through which requests of a trace run one after another, each complete at once, by the trace's clock.

    Attributes:
        cache: of block size 1.
    """

    def __init__(self, num_blocks: int, policy: EvictionPolicy) -> None:
        self._now = 0.0
        self.cache = PrefixCache(num_blocks, 1, policy, clock=lambda: self._now)

    def serve(self, request: TracedRequest) -> int:
        """How many of its blocks hit. A request larger than the cache leaves nothing cached: an engine would refuse it."""
        self._now = max(request.time, math.nextafter(self._now, math.inf))  # what was used later must be younger
        # As in the engine: a request's lowest priority is the most urgent, and the cache keeps the highest longest.
        table = self.cache.open(np.concatenate([request.prompt, LAST_TOKEN]), priority=-request.priority)
        num_hits = table.num_cached_tokens
        tokens = np.concatenate([request.prompt, request.output])
        try:
            self.cache.reserve(table, len(tokens))
        except OutOfBlocks:
            self.cache.abort(table)
        else:
            self.cache.append(table, tokens[num_hits:])
            self.cache.close(table)
        return num_hits


def replay(trace: Trace, num_blocks: int, policy: EvictionPolicy) -> Iterator[int]:
    """Replay the requests of a trace; yields for each the number of its blocks that hit."""
    replayed = Replay(num_blocks, policy)
    for request in trace.requests:
        yield replayed.serve(request)
