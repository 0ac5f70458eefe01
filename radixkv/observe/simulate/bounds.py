"""What a trace's hit rates are to be compared with: others' LRU, the unlimited cache, and a bound for any policy."""

from __future__ import annotations

import heapq
from collections import OrderedDict

from radixkv.observe.simulate.trace import Trace


def unlimited(trace: Trace) -> float:
    """Hit rate of a cache that never evicts."""
    known: set[int] = set()
    num_hits = 0
    for request in trace.requests:
        num_hits += _known_prefix(request.prompt.tolist(), known)
        known.update(request.prompt.tolist(), request.output.tolist())
    return num_hits / max(1, trace.num_asked_blocks)


def block_lru(trace: Trace, num_blocks: int) -> float:
    """Hit rate of LRU over blocks as vLLM keeps it: a queue of free blocks, a request's last block first in line."""
    queue: OrderedDict[int, None] = OrderedDict()
    num_hits = 0
    for request in trace.requests:
        blocks = [*request.prompt.tolist(), *request.output.tolist()]
        num_hits += _known_prefix(request.prompt.tolist(), queue)
        if len(blocks) > num_blocks:
            continue
        for block in blocks:
            queue.pop(block, None)
        while len(queue) + len(blocks) > num_blocks:
            queue.popitem(last=False)
        queue.update((block, None) for block in reversed(blocks))
    return num_hits / max(1, trace.num_asked_blocks)


def belady(trace: Trace, num_blocks: int) -> float:
    """Hit rate when the block goes whose next use is farthest (Belady 1966): it knows the future, so nobody does better.

    Blocks that are not asked for again are never kept, not even for a moment.
    """
    following, places = _next_uses(trace)
    kept: dict[int, int] = {}  # block -> place of its next use
    heap: list[tuple[int, int]] = []
    num_hits, place = 0, 0
    for request in trace.requests:
        prompt = request.prompt.tolist()
        num_hits += _known_prefix(prompt, kept)
        for block in (*prompt, *request.output.tolist()):
            next_use = following[place]
            place += 1
            if next_use == places:
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
    """For every block of every request in order, the place where it is asked for next; the number of places if never."""
    blocks = [block for request in trace.requests for block in (*request.prompt.tolist(), *request.output.tolist())]
    following = [len(blocks)] * len(blocks)
    last_seen: dict[int, int] = {}
    for place in reversed(range(len(blocks))):
        following[place] = last_seen.get(blocks[place], len(blocks))
        last_seen[blocks[place]] = place
    return following, len(blocks)


def _known_prefix(prompt: list[int], known: set[int] | dict[int, int] | OrderedDict[int, None]) -> int:
    return next((place for place, block in enumerate(prompt) if block not in known), len(prompt))
