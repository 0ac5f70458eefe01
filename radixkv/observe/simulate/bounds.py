"""References for a trace's hit rates: LRU per block as in vLLM, an unlimited cache, and Belady's bound for any policy."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Container, Sequence

from radixkv.observe.simulate.trace import Trace


def unlimited(trace: Trace) -> float:
    """Hit rate of a cache that never evicts."""
    cached: set[int] = set()
    num_hits = 0
    for request in trace.requests:
        num_hits += cached_prefix(request.prompt.tolist(), cached)
        cached.update(request.prompt.tolist(), request.output.tolist())
    return num_hits / max(1, trace.num_asked_blocks)


def block_lru(trace: Trace, num_blocks: int) -> float:
    """Hit rate of LRU over blocks as in vLLM: a queue of free blocks, in which a request's last block is evicted first."""
    queue: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for request in trace.requests:
        blocks = [*request.prompt.tolist(), *request.output.tolist()]
        num_hits += cached_prefix(request.prompt.tolist(), queue)
        if len(blocks) > num_blocks:
            continue
        for block in blocks:
            queue.pop(block, None)
        while len(queue) + len(blocks) > num_blocks:
            queue.popitem(last=False)
        queue.update((block, None) for block in reversed(blocks))
    return num_hits / max(1, trace.num_asked_blocks)


def belady(trace: Trace, num_blocks: int) -> float:
    """Hit rate when the block with the farthest next use is evicted (Belady 1966): the optimum, since it knows the future.

    Blocks that are not requested again are never kept.
    """
    next_uses, never = _next_uses(trace)
    kept: dict[int, int] = {}  # block -> position of its next use
    heap: list[tuple[int, int]] = []
    num_hits, position = 0, 0
    for request in trace.requests:
        prompt = request.prompt.tolist()
        num_hits += cached_prefix(prompt, kept)
        for block in (*prompt, *request.output.tolist()):
            next_use = next_uses[position]
            position += 1
            if next_use == never:
                kept.pop(block, None)
                continue
            kept[block] = next_use
            heapq.heappush(heap, (-next_use, block))
        while len(kept) > num_blocks:
            negative, block = heapq.heappop(heap)
            if kept.get(block) == -negative:
                del kept[block]
    return num_hits / max(1, trace.num_asked_blocks)


def _next_uses(trace: Trace) -> tuple[list[int], int]:
    """For every block of all requests in order, the position of its next use; and the value that stands for never.

    An answer that fills a block again caches it anew, whether or not it was kept until then: that does not count as a use.
    """
    blocks = [
        (block, is_asked)
        for request in trace.requests
        for part, is_asked in ((request.prompt, True), (request.output, False))
        for block in part.tolist()
    ]
    never = len(blocks)
    next_uses = [never] * never
    next_use_of: dict[int, int] = {}
    for position in reversed(range(never)):
        block, is_asked = blocks[position]
        next_uses[position] = next_use_of.get(block, never)
        next_use_of[block] = position if is_asked else never
    return next_uses, never


def cached_prefix(blocks: Sequence[int], cached: Container[int]) -> int:
    """How many leading blocks are cached."""
    return next((index for index, block in enumerate(blocks) if block not in cached), len(blocks))
