"""Physical blocks: which are free, and how many owners each other one has.

Free blocks are kept as runs of consecutive ids, because whoever attends over consecutive blocks need not gather them::

    ids   0 1 2 3 4 5 6 7 8 9          runs by start {0: 2, 5: 5}
          . . A A B . . . . .          runs by size  [(2, 0), (5, 5)]
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from sortedcontainers import SortedList

from radixkv.cache.errors import InvalidArgumentError, InvariantViolation, OutOfBlocks

BlockIds = NDArray[np.int32]

# A request smaller than this share of a free run is put into the run's middle rather than at its start, so that it and
# its neighbour can both grow without a break.
_SPREAD_SHARE = 8


class BlockPool:
    """Reference counts and free runs of ``num_blocks`` blocks with ids from 0 on.

    Raises:
        InvalidArgumentError: ``num_blocks`` is not a whole number of at least 1.
    """

    def __init__(self, num_blocks: int) -> None:
        if not isinstance(num_blocks, int) or isinstance(num_blocks, bool) or num_blocks < 1:
            raise InvalidArgumentError(f"num_blocks: expected a whole number of at least 1, got {num_blocks!r}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self.ref_counts: NDArray[np.int32] = np.zeros(num_blocks, dtype=np.int32)
        self._size_of_run: dict[int, int] = {0: num_blocks}  # by first id
        self._start_of_run: dict[int, int] = {num_blocks: 0}  # by the id after the last
        self._runs_by_size: SortedList[tuple[int, int]] = SortedList([(num_blocks, 0)])

    def allocate(self, count: int, after: int | None = None) -> BlockIds:
        """Take ``count`` free blocks, each with one owner then: as few runs of consecutive ids as can be.

        Args:
            after: the block that the first of them should follow, where that one is free.

        Raises:
            OutOfBlocks: fewer are free; none is taken.
        """
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free, 0)
        parts: list[BlockIds] = []
        missing = count
        if missing and after is not None and after + 1 in self._size_of_run:
            taken = min(missing, self._size_of_run[after + 1])
            parts.append(self._take(after + 1, 0, taken))
            missing -= taken
        while missing:
            size, start = self._runs_by_size[-1]
            taken = min(missing, size)
            offset = size // 2 if taken * _SPREAD_SHARE < size < self.num_blocks else 0
            parts.append(self._take(start, offset, taken))
            missing -= taken
        blocks = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int32), *parts])
        self.ref_counts[blocks] = 1
        self.num_free -= count
        return blocks

    def share(self, blocks: BlockIds) -> None:
        """One more owner for each of these held blocks, which must be distinct."""
        self.ref_counts[blocks] += 1

    def release(self, blocks: BlockIds) -> int:
        """One owner fewer for each of these distinct blocks; those without any become free. Returns how many did.

        Raises:
            InvalidArgumentError: an id is foreign or its block is free already; nothing is changed.
        """
        if not len(blocks):
            return 0
        if int(blocks.min()) < 0 or int(blocks.max()) >= self.num_blocks:
            raise InvalidArgumentError(f"blocks: expected ids from 0 to {self.num_blocks - 1}, got {blocks.tolist()}")
        counts = self.ref_counts[blocks]
        if not counts.all():
            raise InvalidArgumentError(f"blocks: {blocks[counts == 0].tolist()} are free already")
        self.ref_counts[blocks] = counts - 1
        freed = blocks[counts == 1]
        if len(freed):
            self._put_back(np.sort(freed))
        return len(freed)

    def check(self) -> None:
        """Raise InvariantViolation unless the free runs are exactly the blocks without owners, and maximal."""
        free = np.zeros(self.num_blocks, dtype=bool)
        for start, size in self._size_of_run.items():
            if self._start_of_run.get(start + size) != start or (size, start) not in self._runs_by_size:
                raise InvariantViolation(f"free run of {size} blocks at {start}: the indexes disagree")
            if start + size in self._size_of_run:
                raise InvariantViolation(f"free runs at {start} and {start + size} touch and are not one")
            free[start : start + size] = True
        if len(self._size_of_run) != len(self._runs_by_size) or len(self._size_of_run) != len(self._start_of_run):
            raise InvariantViolation("the indexes of free runs differ in length")
        wrong = np.flatnonzero(free != (self.ref_counts == 0))
        if len(wrong):
            raise InvariantViolation(f"blocks {wrong.tolist()}: free with owners, or held without")
        if self.num_free != int(free.sum()):
            raise InvariantViolation(f"num_free is {self.num_free}, {int(free.sum())} blocks are free")

    def _take(self, start: int, offset: int, count: int) -> BlockIds:
        size = self._size_of_run[start]
        self._remove_run(start, size)
        if offset:
            self._add_run(start, offset)
        if offset + count < size:
            self._add_run(start + offset + count, size - offset - count)
        return np.arange(start + offset, start + offset + count, dtype=np.int32)

    def _put_back(self, freed: BlockIds) -> None:
        self.num_free += len(freed)
        borders = np.flatnonzero(np.diff(freed) != 1) + 1
        for run in np.split(freed, borders) if len(borders) else [freed]:
            start, stop = int(run[0]), int(run[-1]) + 1
            if start in self._start_of_run:
                before = self._start_of_run[start]
                self._remove_run(before, start - before)
                start = before
            if stop in self._size_of_run:
                size = self._size_of_run[stop]
                self._remove_run(stop, size)
                stop += size
            self._add_run(start, stop - start)

    def _add_run(self, start: int, size: int) -> None:
        self._size_of_run[start] = size
        self._start_of_run[start + size] = start
        self._runs_by_size.add((size, start))

    def _remove_run(self, start: int, size: int) -> None:
        del self._size_of_run[start]
        del self._start_of_run[start + size]
        self._runs_by_size.remove((size, start))
