"""Lowest hit density first, learned online from what is used again, evicted or not.

The idea is that of LHD (least hit density: Beckmann, Chen and Cidon, NSDI 2018): keep what brings the most hits for the
time that it occupies space. New here is how a prefix's reuse is predicted: by four numbers that a radix tree has anyway::

    uses of a node            how often its prefix was requested
    uses of its parent        how often the prefix before it was requested
    its length, its depth     how much was new when it was first requested, and how much was not

By uses of a node and of its parent: 1 below 5,000 is the first question after a system prompt; 1 below 3, the newest
question about a document, or the newest turn of a chat; 3 below 5,000, the document, or the chat so far. Nodes are grouped by
the logarithms of the four numbers.

For each group, the policy learns after how long its nodes are used again (`ReuseTimes`). Evicted prefixes count too, for as
long as the cache remembers them: without these ghosts a small cache would never learn that what it evicts is requested
again. This gives the hit density at every age: the best ratio, over all further times to keep the node, of the probability
of a hit by then to the mean time until then. It is the index of Gittins (1979) for an idle time that may never end. The leaf
with the lowest density is evicted first. As reuse may become likelier with age before it becomes less likely (a prompt is
rarely repeated within a second), the lowest leaf of a group is its oldest or its newest.

A group with few observations is judged by those of coarser groups, or of all nodes. Where groups do not really differ, their
estimates differ by chance, and following them would cost a small cache what LRU would keep. So the oldest leaf of all is
evicted first unless another one's density is lower by a factor, the margin. The policy compares its hits with those that LRU
would have had (`LRUShadow`; experts that are judged by ghosts, as in LeCaR: Vietri et al., HotStorage 2018, and CACHEUS:
Rodriguez et al., FAST 2021). While the policy is ahead, the margin goes to 1; while LRU is ahead, it grows until hardly
anything but age decides; when in doubt, it returns to its initial value. Nothing is tuned to a workload.

What else was tried: ``docs/benchmarks/policies.md``.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

import numpy as np

from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.lru_shadow import LRUShadow
from radixkv.cache.eviction.policy import EvictableLeaf
from radixkv.cache.eviction.reuse_times import AGE_BORDERS, ReuseTimes, hit_densities

if TYPE_CHECKING:
    from radixkv.cache.node import Node

_USES = 8  # 1, 2, 4, 8, 16, 32, 64, 128 and more
_PARENT_USES = 3  # 1, 2, 4 and more
_LENGTHS = 4  # in blocks: 1, 3, 9, 33 and more
_DEPTHS = 2  # in blocks: 0, 4 and more
_SHAPE = (_USES, _PARENT_USES, _LENGTHS * _DEPTHS)
_NUM_GROUPS = math.prod(_SHAPE)
# Densities are refitted, which takes milliseconds, after a quarter as many new idle times as before, within these limits.
_MIN_NEW_IDLE_TIMES, _MAX_NEW_IDLE_TIMES = 32, 1024
# The estimate of a coarser group weighs as much as this many idle times.
_PRIOR_IDLE_TIMES = 120.0
# Within this many standard deviations, neither policy counts as ahead.
_AHEAD = 1.5
# The margin when in doubt, and at most; and the factors by which it changes.
_DOUBT, _MAX_MARGIN = 1.75, 16.0
_STEP, _STEP_BACK = 1.5, 0.9
# A group's candidates: the leaf that it would give up first, the oldest or the newest, and its density; its oldest leaf,
# that one's density and last use; the time at which one of them reaches the next bin of ages. A bare tuple: one is made at
# every change.
_Candidate = tuple[float, EvictableLeaf, float, EvictableLeaf, float, float]


class Adaptive:
    """The leaf with the lowest expected hit density (hits per time in memory) first. Needs no tuning.

    It costs 1.8 to 2.0 us more than LRU per requested block, the memory of evicted prefixes included.
    """

    def __init__(self) -> None:
        self._queues = [LRU() for _ in range(_NUM_GROUPS)]
        self._candidates: dict[int, _Candidate | None] = {}  # of the queues that are not empty; None: to be found anew
        self._now = 0.0
        self._reuse_times = ReuseTimes(_SHAPE)
        self._refit_at = _MIN_NEW_IDLE_TIMES
        self._lru = LRUShadow()
        self._margin = _DOUBT
        self._densities = hit_densities(self._reuse_times.returns(0.0, _PRIOR_IDLE_TIMES)).tolist()

    # -- learning ------------------------------------------------------------------------------------------------

    def on_idle(self, node: EvictableLeaf) -> None:
        uses, parent_uses, num_blocks = node.uses.bit_length(), node.parent_uses.bit_length(), node.num_blocks
        length = (num_blocks - 1).bit_length() // 2
        # Without calls of min(): this runs for every node on the path of every sequence that ends.
        uses = uses if uses < _USES else _USES
        parent_uses = parent_uses if parent_uses < _PARENT_USES else _PARENT_USES
        length = length if length < _LENGTHS else _LENGTHS - 1
        index = ((uses - 1) * _PARENT_USES + parent_uses - 1) * _LENGTHS + length
        group = node.group = index * _DEPTHS + (node.depth >= 4)
        if node.last_use > self._now:  # a pin may end long after the last use
            self._now = node.last_use
        self._reuse_times.begin(group, num_blocks, node.last_use)
        self._lru.begin(num_blocks, node.last_use)
        if self._reuse_times.num_new >= self._refit_at:
            self._refit()

    def on_reuse(self, group: int, num_blocks: int, idle_since: float, now: float, evicted: bool) -> None:
        self._now = now
        self._reuse_times.end(group, num_blocks, idle_since, now)
        self._lru.end(num_blocks, idle_since, evicted)

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        """See `TreeObserver.on_remove`."""
        num_blocks = node.num_blocks - start
        if evicted:
            self._lru.evict(num_blocks)
        else:
            self._lru.replace(num_blocks, node.last_use)

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        """See `TreeObserver.on_clear`."""
        # Which of LRU's blocks were cleared is not known; the oldest stand in for them.
        self._lru.evict(sum(node.num_blocks for node in nodes if node.lock_count == 0))

    def _refit(self) -> None:
        self._move_margin()
        self._densities = hit_densities(self._reuse_times.returns(self._now, _PRIOR_IDLE_TIMES)).tolist()
        self._refit_at = max(_MIN_NEW_IDLE_TIMES, min(_MAX_NEW_IDLE_TIMES, int(self._reuse_times.num_idle_times / 4)))
        self._candidates = dict.fromkeys(self._candidates)

    def _move_margin(self) -> None:
        advantage = self._lru.advantage
        if advantage > _AHEAD:
            self._margin = min(_MAX_MARGIN, self._margin * _STEP)
            self._lru.fade(0.5)
        elif advantage < -_AHEAD:
            self._margin = max(1.0, self._margin * _STEP_BACK)
        else:
            self._margin += (_DOUBT - self._margin) * (1 - _STEP_BACK)
        self._lru.fade(0.1)

    # -- the index -----------------------------------------------------------------------------------------------

    def add(self, leaf: EvictableLeaf) -> None:
        self._queues[leaf.group].add(leaf)
        self._candidates[leaf.group] = None

    def remove(self, leaf: EvictableLeaf) -> None:
        queue = self._queues[leaf.group]
        queue.remove(leaf)
        if queue:
            self._candidates[leaf.group] = None
        else:
            del self._candidates[leaf.group]

    def next_leaf(self) -> EvictableLeaf:
        # Only groups that changed or reached another bin of ages are recomputed: few of them since the last call.
        now, lowest, oldest_use, density_of_oldest = self._now, np.inf, np.inf, np.inf
        lowest_leaf: EvictableLeaf | None = None
        oldest: EvictableLeaf | None = None
        for group, candidate in self._candidates.items():
            if candidate is None or candidate[-1] < now:
                candidate = self._candidates[group] = self._candidate(group)
            density, leaf, of_oldest, oldest_of_group, last_use, _ = candidate
            if density < lowest:
                lowest, lowest_leaf = density, leaf
            if last_use < oldest_use:
                density_of_oldest, oldest, oldest_use = of_oldest, oldest_of_group, last_use
        chosen = oldest if density_of_oldest <= self._margin * lowest else lowest_leaf
        assert chosen is not None
        return chosen

    def leaves(self) -> Collection[EvictableLeaf]:
        return [leaf for group in self._candidates for leaf in self._queues[group].leaves()]

    def _candidate(self, group: int) -> _Candidate:
        queue, densities = self._queues[group], self._densities[group]
        oldest, newest = queue.next_leaf(), queue.newest()
        oldest_use = oldest.last_use
        age_bin = bisect_left(AGE_BORDERS, self._now - oldest_use)
        of_oldest, until = densities[age_bin], oldest_use + AGE_BORDERS[age_bin]
        if newest is not oldest:
            age_bin = bisect_left(AGE_BORDERS, self._now - newest.last_use)
            of_newest, until = densities[age_bin], min(until, newest.last_use + AGE_BORDERS[age_bin])
            if of_newest < of_oldest:
                return of_newest, newest, of_oldest, oldest, oldest_use, until
        return of_oldest, oldest, of_oldest, oldest, oldest_use, until
