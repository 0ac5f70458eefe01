"""Lowest chance of a hit first, learned online from what is used again, evicted or not.

The idea is that of LHD (least hit density: Beckmann, Chen and Cidon, NSDI 2018): what is worth keeping is what brings the
most hits for the time that it takes up space. What is new is what stands for a prefix's prospects. In a radix tree these
are two numbers that are there anyway::

    uses of a node            how often its prefix was asked for
    uses of its parent        how often what comes before it was asked for

1 below 5,000: the first question after a system prompt. 1 below 3: the newest question about a document, or the newest turn
of a chat. 3 below 5,000: the document, or the chat so far. Nodes are grouped by the two logarithms.

Of each group it is counted after how long its nodes were used again: a histogram with two bins an octave. Evicted prefixes
count too, for as long as the cache remembers them. (Without these ghosts a small cache would never learn that what it
evicts returns.) From the histogram follows, for every age, the hit density: the best ratio, over all times that one could
still wait, of the chance of a hit by then to the mean time until then. This is the index of Gittins (1979) for a wait that
may never end. Within a group the least recently used leaf goes first, and of these that with the lowest density.

Until a group has been seen often enough, Laplace's rule of succession stands in for it: what was used n times is used
again with probability n / (n + 1), after times as they were observed over all groups. Nothing is tuned to a workload.

What else was tried, and what each attempt gave: ``radixkv/bench/results/policies.md``.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.eviction.lru import LRU
from radixkv.cache.eviction.policy import EvictableLeaf

Table = NDArray[np.float64]

_LEVELS = 6  # of uses: 1, 2, 4, 8, 16, 32 and more
_NUM_GROUPS = _LEVELS * _LEVELS
# Bins of ages, two an octave, from an eighth of a second to six days; by their upper borders, in seconds. The last has none.
_BORDERS: list[float] = (2.0 ** np.arange(-3, 19, 0.5)).tolist()
_NUM_BINS = len(_BORDERS) + 1
_WIDTHS = np.diff([0.0, *_BORDERS, 2 * _BORDERS[-1]])
_MAX_RETURN = 0.98  # nothing is certain to return

_RETURN_PRIOR = np.repeat([uses / (uses + 1) for uses in (1.0, 2.8, 5.7, 11.3, 22.6, 45.3)], _LEVELS)
_PRIOR_WAITS = 100.0  # the prior counts as much as so many
_HALF_LIFE_WAITS = 50_000  # what was observed counts half after so many
# New densities after an eighth more waits than before, within these limits: two milliseconds, in good time at the start.
_FEWEST_NEW_WAITS, _MOST_NEW_WAITS = 16, 512
# A chosen group goes on giving, until its oldest leaf is in another bin, for so many leaves at most.
_MAX_IN_A_ROW = 32


class Adaptive:
    """Lowest hit density first. Needs no tuning.

    It costs about 2 us more than LRU a block asked for, the memory of evicted prefixes included.
    """

    def __init__(self) -> None:
        self._queues = [LRU() for _ in range(_NUM_GROUPS)]
        self._sizes = [0] * _NUM_GROUPS  # of the queues: asking each for its own would cost more than all else
        self._group_of: dict[EvictableLeaf, int] = {}
        self._now = 0.0
        # Blocks whose wait began, by group; how many of them it ended for, and after how long.
        self._began = [0.0] * _NUM_GROUPS
        self._ended = np.zeros((_NUM_GROUPS, _NUM_BINS))
        self._num_waits = 0.0
        self._num_new_waits = 0
        self._densities: list[list[float]] = []
        self._chosen: int | None = None
        self._chosen_until = 0.0
        self._num_left = 0
        self._refit()

    # -- learning ------------------------------------------------------------------------------------------------

    def wait_begins(self, node: EvictableLeaf) -> None:
        uses = min(node.uses.bit_length(), _LEVELS) - 1
        parent_uses = min(node.parent_uses.bit_length(), _LEVELS) - 1
        group = node.group = uses * _LEVELS + max(0, parent_uses)
        self._began[group] += node.num_blocks
        self._num_new_waits += 1
        if self._num_new_waits >= self._refit_at:
            self._refit()

    def wait_ends(self, group: int, num_blocks: int, seconds: float) -> None:
        self._ended[group, bisect_left(_BORDERS, seconds)] += num_blocks

    def _refit(self) -> None:
        """New densities from all that was observed; older observations count less."""
        fading = 0.5 ** (self._num_new_waits / _HALF_LIFE_WAITS)
        self._num_waits = (self._num_waits + self._num_new_waits) * fading
        self._num_new_waits = 0
        self._refit_at = max(_FEWEST_NEW_WAITS, min(_MOST_NEW_WAITS, int(self._num_waits / 8)))
        self._began = [count * fading for count in self._began]
        self._ended *= fading
        began = np.array(self._began)
        # The prior counts as blocks too: those of so many waits of mean size.
        prior_blocks = _PRIOR_WAITS * max(1.0, began.sum() / max(1.0, self._num_waits))
        times = self._ended.sum(axis=0) + prior_blocks / _NUM_BINS
        prior = _RETURN_PRIOR[:, None] * (times / times.sum())
        returns = (self._ended + prior_blocks * prior) / (began + prior_blocks)[:, None]
        self._densities = hit_densities(returns).tolist()
        self._chosen = None

    # -- the index -----------------------------------------------------------------------------------------------

    def add(self, leaf: EvictableLeaf) -> None:
        self._now = max(self._now, leaf.last_use)
        self._group_of[leaf] = leaf.group
        self._sizes[leaf.group] += 1
        self._queues[leaf.group].add(leaf)

    def remove(self, leaf: EvictableLeaf) -> None:
        group = self._group_of.pop(leaf)
        self._queues[group].remove(leaf)
        self._sizes[group] -= 1
        self._num_left -= 1

    def next_leaf(self) -> EvictableLeaf:
        if self._chosen is not None and self._sizes[self._chosen] and self._num_left > 0:
            leaf = self._queues[self._chosen].next_leaf()
            if leaf.last_use <= self._chosen_until:
                return leaf
        return self._choose()

    def leaves(self) -> Collection[EvictableLeaf]:
        return self._group_of.keys()

    def _choose(self) -> EvictableLeaf:
        """The group whose oldest leaf has the lowest density; of equals, the one with the oldest."""
        candidates = []
        for group, size in enumerate(self._sizes):
            if size:
                leaf = self._queues[group].next_leaf()
                place = bisect_left(_BORDERS, self._now - leaf.last_use)
                candidates.append((self._densities[group][place], leaf.last_use, group, place))
        _, _, self._chosen, place = min(candidates)
        self._chosen_until = self._now - (_BORDERS[place - 1] if place else 0.0)
        self._num_left = _MAX_IN_A_ROW
        return self._queues[self._chosen].next_leaf()


def hit_densities(returns: Table) -> Table:
    """Hits a second of occupied space, at best, by group and age.

    Args:
        returns: ``[groups, bins]``: the probability that a wait ends in each bin.

    Returns:
        ``[groups, bins]``: for a wait that has come to the beginning of a bin, the greatest ratio over all later ends of
        the probability that it ends by then to its mean length until then.
    """
    ended = np.pad(returns.cumsum(axis=1), ((0, 0), (1, 0)))
    ended *= np.minimum(1.0, _MAX_RETURN / ended[:, -1:])
    waiting = 1.0 - ended
    occupied = np.pad(((waiting[:, :-1] + waiting[:, 1:]) / 2 * _WIDTHS).cumsum(axis=1), ((0, 0), (1, 0)))
    hits = ended[:, None, 1:] - ended[:, :-1, None]
    space = occupied[:, None, 1:] - occupied[:, :-1, None]
    # Only ends that come after the beginning count; the others are negative or zero.
    ratios = np.divide(hits, space, out=np.zeros_like(hits), where=space > 0)
    best: Table = ratios.max(axis=2)
    return best
