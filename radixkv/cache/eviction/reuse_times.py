"""After how long prefixes are used again: a survival table by group, learned while most idle times have not ended yet.

A prefix is idle from the end of its last sequence to its next use. An idle time that has not ended may still end: counting it
as endless would underestimate a young cache, leaving it out would overestimate it. So the table is that of Kaplan and Meier
(1958): the probability that an idle time ends in a bin of ages, given that it lasted until then, is the ratio of those that
ended there to those that were observed to reach the bin.

A group is three coordinates. A few idle times are weak evidence, so each estimate is shrunk towards a coarser one::

    all idle times -> by the first coordinate -> by the first two -> by all three
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

# Bins of ages, two per octave, from a 64th of a second to six days; by their upper borders, in seconds.
AGE_BORDERS: tuple[float, ...] = (*(2.0 ** np.arange(-6, 19, 0.5)).tolist(), np.inf)
_NUM_BINS = len(AGE_BORDERS)
_WIDTHS = np.diff([0.0, *AGE_BORDERS[:-1], 2 * AGE_BORDERS[-2]])
_PRIOR_OF_ALL = 5.0  # the uniform prior of all groups together weighs as much as this many observed idle times
_MAX_RETURN = 0.98  # no reuse is certain
_HALF_LIFE = 50_000  # an observation counts half after this many newer idle times
_MAX_EPOCHS = 128


class ReuseTimes:
    """Idle times in progress and ended ones, in blocks, by group.

    Those in progress are kept by the epoch in which they began; each `returns` ends an epoch. When there are 128 epochs,
    neighbours in the older half are merged: great ages need less resolution.

    Args:
        shape: groups by coordinate; a group's number is its flat index in an array of this shape.

    Attributes:
        num_idle_times: those that had begun by the last `returns`; older ones count less.
        num_new: those that have begun since.
    """

    def __init__(self, shape: tuple[int, int, int]) -> None:
        self._shape = (*shape, _NUM_BINS)
        self._num_groups = shape[0] * shape[1] * shape[2]
        self._ended = np.zeros((self._num_groups, _NUM_BINS))
        # By epoch: when it began, the weight of its idle times, and the blocks still idle, by group, times that weight.
        self._begun_at: list[float] = []
        self._weights: list[float] = []
        self._idle = np.zeros((_MAX_EPOCHS, self._num_groups))
        self._epoch_is_over = True
        self._latest = -np.inf
        self.num_idle_times = 0.0
        self.num_new = 0

    def begin(self, group: int, num_blocks: int, since: float) -> None:
        """``num_blocks`` blocks of a group are idle since this moment: usually now, earlier for what was pinned."""
        # Idle times that begin at the same moment share an epoch, so `end` can find it by that moment.
        if since > self._latest:
            self._latest = since
            if self._epoch_is_over:
                self._epoch_is_over = False
                self._begun_at.append(since)
                self._weights.append(1.0)
        self.num_new += 1
        epoch = self._epoch(since) if since < self._latest else len(self._begun_at) - 1
        self._idle[epoch, group] += self._weights[epoch] * num_blocks

    def end(self, group: int, num_blocks: int, idle_since: float, now: float) -> None:
        """``num_blocks`` blocks of a group that were idle since ``idle_since`` are used again."""
        epoch = self._epoch(idle_since)
        counted = self._weights[epoch] * num_blocks
        self._idle[epoch, group] -= counted
        self._ended[group, bisect_left(AGE_BORDERS, now - idle_since)] += counted

    def returns(self, now: float, prior_idle_times: float) -> Table:
        """``[groups, bins]``: the probability that an idle time ends in each bin of ages.

        Args:
            now: by the cache's clock, in seconds.
            prior_idle_times: a coarser estimate weighs as much as this many observed idle times.
        """
        self._end_epoch()
        ended = self._ended.reshape(self._shape)
        at_risk = self._at_risk(now).reshape(self._shape)
        mean_blocks = max(1.0, float(at_risk[..., 0].sum()) / max(1.0, self.num_idle_times))
        hazards = np.full(_NUM_BINS, 1.0 / _NUM_BINS)
        hazards = _shrunk(hazards, _PRIOR_OF_ALL * mean_blocks, ended, at_risk, (0, 1, 2))
        weight = prior_idle_times * mean_blocks
        for axes in ((1, 2), (2,)):
            hazards = _shrunk(hazards, weight, ended, at_risk, axes)
        hazards = _shrunk_monotonically(hazards, weight, ended, at_risk)
        return (hazards * _survival(hazards)).reshape(self._num_groups, _NUM_BINS)

    def _epoch(self, since: float) -> int:
        """The epoch that a moment falls into."""
        return max(0, bisect_right(self._begun_at, since) - 1)

    def _end_epoch(self) -> None:
        """Fade what was observed, and free an entry for the next epoch."""
        self._epoch_is_over = True
        fading = 0.5 ** (self.num_new / _HALF_LIFE)
        self.num_idle_times = (self.num_idle_times + self.num_new) * fading
        self.num_new = 0
        self._ended *= fading
        self._idle *= fading
        self._weights = [weight * fading for weight in self._weights]
        if len(self._begun_at) == _MAX_EPOCHS:
            self._join_old_epochs()

    def _join_old_epochs(self) -> None:
        older = _MAX_EPOCHS // 2
        self._weights[:older] = ((np.array(self._weights[0:older:2]) + self._weights[1:older:2]) / 2).tolist()
        self._begun_at[:older] = self._begun_at[0:older:2]
        joined = self._idle[0:older:2] + self._idle[1:older:2]
        self._idle = np.concatenate([joined, self._idle[older:], np.zeros_like(joined)])

    def _at_risk(self, now: float) -> Table:
        """``[groups, bins]``: blocks whose idle times were observed to reach a bin; those that are in it now count half."""
        in_progress = np.zeros((_NUM_BINS, self._num_groups))
        bins = np.searchsorted(AGE_BORDERS, now - np.array(self._begun_at))
        np.add.at(in_progress, bins, self._idle[: len(bins)])
        here = np.maximum(in_progress.T, 0.0)
        reached = (here + self._ended)[:, ::-1].cumsum(axis=1)[:, ::-1]
        at_risk: Table = reached - here / 2
        return at_risk


def _shrunk(hazards: Table, weight: float, ended: Table, at_risk: Table, axes: tuple[int, ...]) -> Table:
    """The probability that an idle time ends in a bin that it reached, over joined ``axes`` of groups, shrunk to ``hazards``.

    These weigh as much as ``weight`` observed blocks, of which as many reached a bin as ``hazards`` themselves imply.
    """
    prior_weight = weight * _survival(hazards)
    ended, at_risk = ended.sum(axis=axes, keepdims=True), at_risk.sum(axis=axes, keepdims=True)
    shrunk: Table = np.minimum(1.0, (ended + prior_weight * hazards) / (at_risk + prior_weight))
    return shrunk


def _shrunk_monotonically(hazards: Table, weight: float, ended: Table, at_risk: Table) -> Table:
    """`_shrunk`, for each group; and a bin's prior is never below the estimate of the bin before.

    Few idle times reach great ages: what is used often keeps its probability of reuse where a coarser group's has faded.
    """
    prior_weight = weight * _survival(hazards)
    # By bins, then groups: each bin needs the one before.
    seen = (ended / (at_risk + prior_weight)).reshape(-1, _NUM_BINS).T.copy()
    unseen = (prior_weight / (at_risk + prior_weight)).reshape(-1, _NUM_BINS).T.copy()
    shrunk = np.broadcast_to(hazards, ended.shape).reshape(-1, _NUM_BINS).T.copy()
    before: Table = np.zeros(shrunk.shape[1])
    for age_bin in range(_NUM_BINS):
        before = np.minimum(1.0, seen[age_bin] + unseen[age_bin] * np.maximum(shrunk[age_bin], before))
        shrunk[age_bin] = before
    return shrunk.T.reshape(ended.shape)


def _survival(hazards: Table) -> Table:
    """The probability of reaching each bin."""
    survival = np.ones_like(hazards)
    np.cumprod(1.0 - hazards[..., :-1], axis=-1, out=survival[..., 1:])
    return np.maximum(survival, 1e-9)


def hit_densities(returns: Table) -> Table:
    """The most hits per second of occupied space, by group and age.

    Args:
        returns: ``[groups, bins]``: the probability that an idle time ends in each bin.

    Returns:
        ``[groups, bins]``: for an idle time that has reached the beginning of a bin, the greatest ratio over all later
        ends of the probability that it ends by then to its mean length until then.
    """
    # By bins, then groups: whole rows at once, which is three times as fast.
    ended = np.pad(returns.T.cumsum(axis=0), ((1, 0), (0, 0)))
    ended *= np.minimum(1.0, _MAX_RETURN / ended[-1])
    idle = 1.0 - ended
    occupied = np.pad(((idle[:-1] + idle[1:]) / 2 * _WIDTHS[:, None]).cumsum(axis=0), ((1, 0), (0, 0)))
    best = np.zeros_like(returns.T)
    for length in range(1, _NUM_BINS + 1):
        hits, space = ended[length:] - ended[:-length], occupied[length:] - occupied[:-length]
        np.maximum(best[: len(hits)], hits / space, out=best[: len(hits)])
    return best.T
