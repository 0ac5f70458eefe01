"""How long a step takes by its number of rows, learned from the steps that were run.

On a GPU, and on a CPU up to a dozen rows or more, a row more is almost free, because a step takes as long as the weights take
to be read; from some number on each row costs. Where that is depends on model, machine and load, so it is not assumed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

# Steps of a number of rows between two neighbours count for the lower one.
_SIZES = tuple(sorted({1, 2, 3, *(round(4 * 2 ** (i / 2)) for i in range(24))}))
# A newer step counts as much as all before it did this many steps ago; at first it is the mean.
_MEMORY = 16
# A step that took so many times as long as expected was disturbed, and counts for no more than this.
_MAX_SURPRISE = 3.0
# Each row more than were ever run is thought to take half of what a row took on average, of so many at least.
_FREE_ROWS = 64
# With drafts, sampling waits for the host, and rows of a sequence are more than one: what that takes is learned as a factor,
# of so many such steps of sizes that were run without, too. It is forgotten in so many steps without drafts, lest one bad
# measurement end drafts for ever.
_OVERHEAD_MEMORY = 8
_OVERHEAD_FORGOTTEN = 512


class StepTimes:
    """Seconds by number of rows, never fewer for more rows."""

    def __init__(self) -> None:
        self._overhead = 1.0
        self._is_fitted = True
        # By size: rows, seconds without what drafts cost besides, and number of steps.
        self._means: dict[int, tuple[float, float, int]] = {}
        self._undrafted: set[int] = set()  # sizes whose mean is of steps without drafts alone
        self._rows: NDArray[np.float64] = np.zeros(0)
        self._seconds: NDArray[np.float64] = np.zeros(0)

    def observe(self, num_rows: int, seconds: float, *, drafting: bool) -> None:
        """Note a step, and whether some of its rows were drafts."""
        size = _SIZES[bisect_right(_SIZES, num_rows) - 1]
        rows, mean, count = self._means.get(size, (float(num_rows), seconds, 0))
        if count:
            seconds = min(seconds, _MAX_SURPRISE * mean)
        if not drafting:
            self._overhead += (1.0 - self._overhead) / _OVERHEAD_FORGOTTEN
            if size not in self._undrafted:
                self._undrafted.add(size)
                count = 0
        elif size in self._undrafted:
            # Were it part of the mean by which it is judged, the factor would tend to 1 while drafting goes on.
            self._overhead += (seconds / mean - self._overhead) / _OVERHEAD_MEMORY
            return
        else:
            seconds /= max(self._overhead, 1.0)
        count = min(count + 1, _MEMORY)
        self._means[size] = rows + (num_rows - rows) / count, mean + (seconds - mean) / count, count
        self._is_fitted = False

    def predict(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for each number of rows, ascending; equal ones before anything was observed.

        Args:
            num_rows: the first is that of a step without drafts.
        """
        if not self._is_fitted:
            self._fit()
        if not len(self._rows):
            return np.ones(len(num_rows))
        predicted = np.interp(num_rows, self._rows, self._seconds)
        last_rows, last_seconds = self._rows[-1], self._seconds[-1]
        slope = last_seconds / (2 * max(last_rows, _FREE_ROWS))
        beyond: NDArray[np.float64] = predicted + slope * np.maximum(num_rows - last_rows, 0)
        beyond[1:] *= max(self._overhead, 1.0)
        return beyond

    def _fit(self) -> None:
        """The nearest ascending numbers (pool adjacent violators, Ayer et al. 1955)."""
        pools: list[list[float]] = []  # weight, seconds, how many sizes
        means = [self._means[size] for size in sorted(self._means)]
        for _, seconds, count in means:
            pools.append([float(count), seconds, 1])
            while len(pools) > 1 and pools[-2][1] > pools[-1][1]:
                weight, mean, length = pools.pop()
                before = pools[-1]
                total = before[0] + weight
                before[1] = (before[0] * before[1] + weight * mean) / total
                before[0], before[2] = total, before[2] + length
        self._is_fitted = True
        self._rows = np.array([rows for rows, _, _ in means])
        self._seconds = np.array(list(itertools.chain(*([mean] * int(length) for _, mean, length in pools))))
