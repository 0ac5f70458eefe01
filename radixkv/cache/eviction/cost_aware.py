"""Cheapest to recompute first (GreedyDual-Size with frequency: Cao and Irani 1997, Cherkasova 1998)."""

from __future__ import annotations

from radixkv.cache.arguments import is_number
from radixkv.cache.errors import InvalidArgumentError
from radixkv.cache.eviction.lfu import LFU
from radixkv.cache.eviction.policy import EvictableLeaf


class CostAware(LFU):
    """LFU, weighted by depth: the leaf that frees a block at the least expected cost is evicted first.

    A block deep in a prompt costs more to compute than the first one, because its tokens attend to all before them. So a
    block's worth is ``uses * (1 + depth / double_depth)``, on top of the worth of the last evicted leaf, which ages the
    others. A leaf's depth is that of its last block at the time it became a leaf; blocks that it gives up later do not lower
    its worth.

    Args:
        double_depth: at this depth, in blocks, a block costs twice as much as the first. At 1,024
            blocks of 16 tokens attention takes about as long as all else in models of a few billion parameters.

    Raises:
        InvalidArgumentError: ``double_depth`` is not above 0.
    """

    def __init__(self, double_depth: int = 1024) -> None:
        if not (is_number(double_depth) and double_depth > 0):
            raise InvalidArgumentError(f"double_depth: expected blocks above 0, got {double_depth!r}")
        super().__init__()
        self._double_depth = double_depth

    def add(self, leaf: EvictableLeaf) -> None:
        depth = leaf.depth + leaf.num_blocks
        self._heap.push(leaf, self._age + leaf.uses * (1 + depth / self._double_depth), leaf.last_use)
