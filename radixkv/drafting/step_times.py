"""How long a step takes by its number of rows, learned from the steps that were run.

On a GPU, and on a CPU up to a dozen rows or more, another row is almost free, because a step takes as long as reading the
weights; from some number on, each row costs. That number depends on model, machine and load, so it is not assumed.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right

import numpy as np
from numpy.typing import NDArray

# A step with a number of rows between two of these sizes counts for the lower one.
_SIZES = tuple(sorted({1, 2, 3, *(round(4 * 2 ** (i / 2)) for i in range(24))}))
# A size's time is the mean of its first steps, up to this many; after that, each new step has one part in this many.
_MEMORY = 16
# A step that took more than this multiple of the mean was disturbed, and counts as this multiple.
_MAX_SURPRISE = 3.0
# A row beyond the most ever run is assumed to take half the average time per row, of at least this many rows.
_FREE_ROWS = 64
# With drafts, sampling waits for the host, and a sequence has several rows: the overhead is learned as a factor, over about
# the first number of drafting steps, of sizes that were also run without drafts. It is forgotten over the second number of
# steps without drafts, so that one bad measurement does not end drafting for good.
_OVERHEAD_MEMORY = 8
_OVERHEAD_FORGOTTEN = 512


class StepTimes:
    """Seconds by number of rows, never fewer for more rows."""

    def __init__(self) -> None:
        self._overhead = 1.0
        self._is_fitted = True
        # By size: mean rows, mean seconds without the overhead of drafts, and number of steps, up to _MEMORY.
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
            # If this step went into the mean that it is compared with, the factor would tend to 1 while drafting goes on.
            self._overhead += (seconds / mean - self._overhead) / _OVERHEAD_MEMORY
            return
        else:
            seconds /= max(self._overhead, 1.0)
        count = min(count + 1, _MEMORY)
        self._means[size] = rows + (num_rows - rows) / count, mean + (seconds - mean) / count, count
        self._is_fitted = False

    def predict(self, num_rows: NDArray[np.int64]) -> NDArray[np.float64]:
        """Seconds for each number of rows, ascending; all equal before anything was observed.

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
        """Fit the nearest ascending times (pool adjacent violators, Ayer et al. 1955)."""
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
