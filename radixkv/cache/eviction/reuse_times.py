"""After how long prefixes are used again: a survival table by group, learned while most waits have not ended yet.

A wait begins when nobody uses a prefix any more, and ends with its next use. Those that have not ended may still end: to
count them as never would call a young cache hopeless, to leave them out would call it perfect. So the table is that of
Kaplan and Meier (1958): the chance that a wait ends in a bin of ages, given that it lasted until then, is the number of waits
that ended there to the number that were seen to come as far.

A group is three coordinates. Few waits tell little of a group, so each is an estimate drawn towards a coarser one::

    all waits -> by the first coordinate -> by the first two -> by all three
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

# Bins of ages, two an octave, from an eighth of a second to six days; by their upper borders, in seconds.
AGE_BORDERS: list[float] = [*(2.0 ** np.arange(-3, 19, 0.5)).tolist(), np.inf]
_NUM_BINS = len(AGE_BORDERS)
_WIDTHS = np.diff([0.0, *AGE_BORDERS[:-1], 2 * AGE_BORDERS[-2]])
_COARSER_COUNTS_AS = 50.0  # waits: so much a coarser estimate weighs in a finer one
_MAX_RETURN = 0.98  # nothing is certain to return
_HALF_LIFE = 50_000  # what was observed counts half after so many waits
_MAX_EPOCHS = 128


class ReuseTimes:
    """Waits in progress and waits that ended, in blocks, by group.

    Waits in progress are kept by the epoch in which they began; an epoch ends with each `returns`. When there are 128 epochs,
    neighbours in the older half become one: great ages need not be known as finely.

    Args:
        shape: groups by coordinate; a group's number is that of its place in an array of this shape.

    Attributes:
        num_waits: waits that had begun by the last `returns`; older ones count less.
        num_new_waits: those that have begun since.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = (*shape, _NUM_BINS)
        self._num_groups = shape[0] * shape[1] * shape[2]
        self._ended = np.zeros((self._num_groups, _NUM_BINS))
        # By epoch: when it began, what its waits count, and the blocks that still wait, by group and so weighted.
        self._begun_at: list[float] = []
        self._weights: list[float] = []
        self._waiting = np.zeros((_MAX_EPOCHS, self._num_groups))
        self._epoch_is_over = True
        self._latest = -np.inf
        self.num_waits = 0.0
        self.num_new_waits = 0

    def begin(self, group: int, num_blocks: int, now: float) -> None:
        """So many blocks of a group wait from now on."""
        # Waits of one moment are of one epoch: by that moment it is found again.
        if now > self._latest:
            self._latest = now
            if self._epoch_is_over:
                self._epoch_is_over = False
                self._begun_at.append(now)
                self._weights.append(1.0)
        self.num_new_waits += 1
        self._waiting[len(self._begun_at) - 1, group] += num_blocks

    def end(self, group: int, num_blocks: int, begun_at: float, now: float) -> None:
        """So many blocks that have waited since ``begun_at`` are used again."""
        epoch = max(0, bisect_right(self._begun_at, begun_at) - 1)
        counted = self._weights[epoch] * num_blocks
        self._waiting[epoch, group] -= counted
        self._ended[group, bisect_left(AGE_BORDERS, now - begun_at)] += counted

    def returns(self, now: float) -> Table:
        """``[groups, bins]``: the probability that a wait ends in each bin of ages."""
        self._end_epoch()
        ended = self._ended.reshape(self._shape)
        at_risk = self._at_risk(now).reshape(self._shape)
        mean_blocks = max(1.0, float(at_risk[..., 0].sum()) / max(1.0, self.num_waits))
        weight = _COARSER_COUNTS_AS * mean_blocks
        chances = np.full(_NUM_BINS, 1.0 / _NUM_BINS)
        for axes in ((0, 1, 2), (1, 2), (2,)):
            chances = _towards(chances, weight, ended, at_risk, axes)
        chances = _steadily_towards(chances, weight, ended, at_risk)
        return (chances * _lasting(chances)).reshape(self._num_groups, _NUM_BINS)

    def _end_epoch(self) -> None:
        """Let what was observed fade, and make room for the next epoch."""
        self._epoch_is_over = True
        fading = 0.5 ** (self.num_new_waits / _HALF_LIFE)
        self.num_waits = (self.num_waits + self.num_new_waits) * fading
        self.num_new_waits = 0
        self._ended *= fading
        self._waiting *= fading
        self._weights = [weight * fading for weight in self._weights]
        if len(self._begun_at) == _MAX_EPOCHS:
            self._join_old_epochs()

    def _join_old_epochs(self) -> None:
        older = _MAX_EPOCHS // 2
        self._weights[:older] = ((np.array(self._weights[0:older:2]) + self._weights[1:older:2]) / 2).tolist()
        self._begun_at[:older] = self._begun_at[0:older:2]
        joined = self._waiting[0:older:2] + self._waiting[1:older:2]
        self._waiting = np.concatenate([joined, self._waiting[older:], np.zeros_like(joined)])

    def _at_risk(self, now: float) -> Table:
        """``[groups, bins]``: blocks whose waits were seen to come to a bin, those that are in it now by half."""
        in_progress = np.zeros((_NUM_BINS, self._num_groups))
        bins = np.searchsorted(AGE_BORDERS, now - np.array(self._begun_at))
        np.add.at(in_progress, bins, self._waiting[: len(bins)])
        here = np.maximum(in_progress.T, 0.0)
        gone_on = (here + self._ended)[:, ::-1].cumsum(axis=1)[:, ::-1]
        at_risk: Table = gone_on - here / 2
        return at_risk


def _towards(chances: Table, weight: float, ended: Table, at_risk: Table, axes: tuple[int, ...]) -> Table:
    """The chances that a wait which came to a bin ends there, of groups joined over ``axes``, drawn towards ``chances``.

    These count as much as ``weight`` blocks of which as many have come to a bin as these chances themselves say.
    """
    counts_as = weight * _lasting(chances)
    ended, at_risk = ended.sum(axis=axes, keepdims=True), at_risk.sum(axis=axes, keepdims=True)
    drawn: Table = np.minimum(1.0, (ended + counts_as * chances) / (at_risk + counts_as))
    return drawn


def _steadily_towards(chances: Table, weight: float, ended: Table, at_risk: Table) -> Table:
    """`_towards`, for each group; and no chance is taken to be below that of the bin before until this was seen.

    Few waits come to great ages. What is used often is not lost because a coarser group's waits of that age were.
    """
    counts_as = weight * _lasting(chances)
    # By bins, then groups: each bin needs the one before.
    seen = (ended / (at_risk + counts_as)).reshape(-1, _NUM_BINS).T.copy()
    unseen = (counts_as / (at_risk + counts_as)).reshape(-1, _NUM_BINS).T.copy()
    drawn = np.broadcast_to(chances, ended.shape).reshape(-1, _NUM_BINS).T.copy()
    before: Table = np.zeros(drawn.shape[1])
    for age_bin in range(_NUM_BINS):
        before = np.minimum(1.0, seen[age_bin] + unseen[age_bin] * np.maximum(drawn[age_bin], before))
        drawn[age_bin] = before
    return drawn.T.reshape(ended.shape)


def _lasting(chances: Table) -> Table:
    """The probability of coming to each bin."""
    lasting = np.ones_like(chances)
    np.cumprod(1.0 - chances[..., :-1], axis=-1, out=lasting[..., 1:])
    return np.maximum(lasting, 1e-9)


def hit_densities(returns: Table) -> Table:
    """Hits a second of occupied space, at best, by group and age.

    Args:
        returns: ``[groups, bins]``: the probability that a wait ends in each bin.

    Returns:
        ``[groups, bins]``: for a wait that has come to the beginning of a bin, the greatest ratio over all later ends of
        the probability that it ends by then to its mean length until then.
    """
    # By bins, then groups: whole rows at once, which is three times as fast.
    ended = np.pad(returns.T.cumsum(axis=0), ((1, 0), (0, 0)))
    ended *= np.minimum(1.0, _MAX_RETURN / ended[-1])
    waiting = 1.0 - ended
    occupied = np.pad(((waiting[:-1] + waiting[1:]) / 2 * _WIDTHS[:, None]).cumsum(axis=0), ((1, 0), (0, 0)))
    best = np.zeros_like(returns.T)
    for length in range(1, _NUM_BINS + 1):
        hits, space = ended[length:] - ended[:-length], occupied[length:] - occupied[:-length]
        np.maximum(best[: len(hits)], hits / space, out=best[: len(hits)])
    return best.T
