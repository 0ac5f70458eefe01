"""Physical blocks: which are free, and how many owners each other one has.

Free blocks are kept as runs of consecutive ids, because attention over consecutive blocks need not gather them::

    ids   0 1 2 3 4 5 6 7 8 9          runs, start -> stop   {0: 2, 5: 10}
          . . A A B . . . . .          by size class         2..3: [stop 2]   4..7: [stop 10]

Runs are filed by size class, the power of two that their size has reached, under their end. So a run whose first block is
allocated, as happens whenever a sequence grows, mostly keeps its entry, and every operation on a run takes constant time.

A full cache evicts just what it needs and allocates it at once, often in many short runs: so blocks that are released
together are filed only when an allocation has a choice among free blocks.
"""

from __future__ import annotations

from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.arguments import check_count
from radixkv.cache.errors import InvalidArgumentError, InvariantViolation, OutOfBlocks

BlockIds = NDArray[np.int32]

_MAX_BLOCKS = (1 << 31) - 1  # their ids are int32
# An allocation of less than one part in this many of a free run is placed in the run's middle rather than at its start, so
# that both it and the blocks before the run can grow contiguously.
_SPREAD_SHARE = 8


class BlockPool:
    """Reference counts and free runs of ``num_blocks`` blocks with ids from 0 on.

    Attributes:
        ref_counts: owners of each block, int32.

    Raises:
        InvalidArgumentError: ``num_blocks`` is not a whole number from 1 to 2**31 - 1.
        MemoryError: their counts do not fit into memory.
    """

    def __init__(self, num_blocks: int) -> None:
        num_blocks = check_count("num_blocks", num_blocks, 1)
        if num_blocks > _MAX_BLOCKS:
            raise InvalidArgumentError(f"num_blocks: expected at most {_MAX_BLOCKS:,}, got {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        # Two views of the same counts: numpy for many blocks, the array for single ones, where it is three times as fast.
        try:
            self._counts = array("i", bytes(4 * num_blocks))
        except MemoryError:
            raise MemoryError(
                f"num_blocks: expected as many as there is memory for, got {num_blocks}: their counts take "
                f"{4 * num_blocks:,} bytes"
            ) from None
        self.ref_counts = self._view_of_counts()
        self._stop_of: dict[int, int] = {}
        self._start_of: dict[int, int] = {}
        # Index n: the ends of the runs of 2 ** (n - 1) to 2 ** n - 1 blocks; a dict for its order and quick removal.
        self._classes: list[dict[int, None]] = [{} for _ in range(num_blocks.bit_length() + 1)]
        self._top_class = 0  # no class above it has a run; lowered by `_large_run`
        self._loose: list[BlockIds] = []  # free, and not filed yet; ascending
        self._add_run(0, num_blocks)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "ref_counts"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.ref_counts = self._view_of_counts()  # a copied view would be a memory of its own

    def _view_of_counts(self) -> NDArray[np.int32]:
        return np.frombuffer(self._counts, dtype=np.int32)

    def allocate(self, count: int, after: int | None = None, *, low: bool = False) -> BlockIds:
        """Allocate ``count`` free blocks, with one owner each, in few runs of consecutive ids.

        Args:
            after: the block that the first of them should follow, where that one is free.
            low: otherwise take the lowest free run that is long enough, found among all runs, so that few ids are ever used.

        Raises:
            InvalidArgumentError: ``count`` is not a whole number of at least 0.
            OutOfBlocks: fewer are free; none is allocated.
        """
        count = check_count("count", count, 0)
        if count > self.num_free:
            raise OutOfBlocks(count, self.num_free, 0)
        if count == 1 and not low:
            return np.array([self.allocate_one(after)], dtype=np.int32)
        blocks = self._allocate_all(after) if count == self.num_free else self._allocate_some(count, after, low)
        self.ref_counts[blocks] = 1
        self.num_free -= count
        return blocks

    def allocate_one(self, after: int | None = None) -> int:
        """`allocate` of one block, not a low one, without an array: what decoding does most.

        Raises:
            OutOfBlocks: none is free.
        """
        if not self.num_free:
            raise OutOfBlocks(1, 0, 0)
        self._file_loose()
        if after is not None and after + 1 in self._stop_of:
            block = after + 1
        else:
            start, size = self._large_run()
            offset = self._offset(size, 1)
            block = start + offset
            if offset:
                self._split_run(start, block)
        self._shorten_run(block, 1)
        self._counts[block] = 1
        self.num_free -= 1
        return block

    def share(self, blocks: BlockIds, count: int = 1) -> None:
        """``count`` more owners for each of these blocks.

        Raises:
            InvalidArgumentError: ``blocks`` is not an array of ids, an id is foreign or given twice, its block is free, or
                ``count`` is not a whole number of at least 0; nothing is changed.
        """
        count = check_count("count", count, 0)
        self._require_held(blocks)
        self.ref_counts[blocks] += count

    def release(self, blocks: BlockIds) -> int:
        """One owner fewer for each of these blocks; those without any become free. Returns how many did.

        Raises:
            InvalidArgumentError: ``blocks`` is not an array of ids, an id is foreign or given twice, or its block is free
                already; nothing is changed.
        """
        ordered = self._require_held(blocks)
        if len(ordered) == 1:
            return self._release_one(int(ordered[0]))
        counts = self.ref_counts[ordered] - 1
        self.ref_counts[ordered] = counts
        freed = ordered[counts == 0]
        if len(freed):
            self.num_free += len(freed)
            self._loose.append(freed)
        return len(freed)

    def check(self) -> None:
        """Raise InvariantViolation unless exactly the blocks without owners are free, and free runs are maximal."""
        free = np.zeros(self.num_blocks, dtype=bool)
        for start, stop in self._stop_of.items():
            if self._start_of.get(stop) != start or stop not in self._classes[(stop - start).bit_length()]:
                raise InvariantViolation(f"free run {start}..{stop}: the indexes disagree")
            if stop in self._stop_of:
                raise InvariantViolation(f"free runs at {start} and {stop} touch and are not one")
            free[start:stop] = True
        for freed in self._loose:
            if free[freed].any():
                raise InvariantViolation(f"blocks {freed[free[freed]].tolist()} are free twice")
            free[freed] = True
        if any(self._classes[self._top_class + 1 :]):
            raise InvariantViolation(f"there are free runs above size class {self._top_class}")
        if not len(self._stop_of) == len(self._start_of) == sum(map(len, self._classes)):
            raise InvariantViolation("the indexes of free runs differ in length")
        wrong = np.flatnonzero(free != (self.ref_counts == 0))
        if len(wrong):
            raise InvariantViolation(f"blocks {wrong.tolist()}: free with owners, or held without")
        if self.num_free != int(free.sum()):
            raise InvariantViolation(f"num_free is {self.num_free}, {int(free.sum())} blocks are free")

    def _allocate_all(self, after: int | None) -> BlockIds:
        """Every free block, in ascending order, except that the run that follows ``after`` is first."""
        for start, stop in list(self._stop_of.items()):
            self._remove_run(start, stop)
            self._loose.append(np.arange(start, stop, dtype=np.int32))
        blocks = np.sort(np.concatenate([np.empty(0, dtype=np.int32), *self._loose]))
        self._loose.clear()
        if after is not None:
            start = int(np.searchsorted(blocks, after + 1))
            if start < len(blocks) and blocks[start] == after + 1:
                blocks = np.concatenate([blocks[start:], blocks[:start]])
        return blocks

    def _allocate_some(self, count: int, after: int | None, low: bool) -> BlockIds:
        """Some of the free blocks: first those that follow ``after``, then from the lowest run or the largest ones."""
        self._file_loose()
        parts: list[BlockIds] = []
        missing = count
        if missing and after is not None and after + 1 in self._stop_of:
            num_here = min(missing, self._stop_of[after + 1] - after - 1)
            parts.append(self._allocate_run(after + 1, 0, num_here))
            missing -= num_here
        if missing and low:
            lowest = min((start for start, stop in self._stop_of.items() if stop - start >= missing), default=None)
            if lowest is not None:
                parts.append(self._allocate_run(lowest, 0, missing))
                missing = 0
        while missing:
            start, size = self._large_run()
            num_here = min(missing, size)
            parts.append(self._allocate_run(start, self._offset(size, num_here), num_here))
            missing -= num_here
        return parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, dtype=np.int32), *parts])

    def _require_held(self, blocks: BlockIds) -> BlockIds:
        """The blocks in ascending order; raises unless each has an owner and is named once."""
        if not isinstance(blocks, np.ndarray) or blocks.ndim != 1 or blocks.dtype.kind not in "iu":
            raise InvalidArgumentError(f"blocks: expected a one-dimensional array of ids, got {blocks!r:.80}")
        if not len(blocks):
            return blocks
        ordered = np.sort(blocks) if len(blocks) > 1 else blocks
        if int(ordered[0]) < 0 or int(ordered[-1]) >= self.num_blocks:
            raise InvalidArgumentError(f"blocks: expected ids from 0 to {self.num_blocks - 1}, got {blocks.tolist()}")
        if len(ordered) == 1:
            if not self._counts[int(ordered[0])]:
                raise InvalidArgumentError(f"blocks: {blocks.tolist()} is free already")
            return ordered
        if (ordered[1:] == ordered[:-1]).any():
            raise InvalidArgumentError(f"blocks: expected distinct ids, got {blocks.tolist()}")
        counts = self.ref_counts[ordered]
        if not counts.all():
            raise InvalidArgumentError(f"blocks: {ordered[counts == 0].tolist()} are free already")
        return ordered

    def _release_one(self, block: int) -> int:
        self._counts[block] -= 1
        if self._counts[block]:
            return 0
        self.num_free += 1
        self._merge_run(block, block + 1)
        return 1

    def _file_loose(self) -> None:
        for freed in self._loose:
            borders = np.flatnonzero(np.diff(freed) != 1) + 1
            starts = freed[np.concatenate(([0], borders))].tolist()
            stops = (freed[np.concatenate((borders, [len(freed)])) - 1] + 1).tolist()
            for start, stop in zip(starts, stops, strict=True):
                self._merge_run(start, stop)
        self._loose.clear()

    def _large_run(self) -> tuple[int, int]:
        """Start and size of a free run; none is twice as long or longer."""
        while not self._classes[self._top_class]:
            self._top_class -= 1
        stop = next(reversed(self._classes[self._top_class]))
        start = self._start_of[stop]
        return start, stop - start

    def _offset(self, size: int, count: int) -> int:
        """The offset in a free run of ``size`` blocks at which ``count`` are allocated."""
        return size // 2 if count * _SPREAD_SHARE < size < self.num_blocks else 0

    def _allocate_run(self, start: int, offset: int, count: int) -> BlockIds:
        first = start + offset
        if offset:
            self._split_run(start, first)
        self._shorten_run(first, count)
        return np.arange(first, first + count, dtype=np.int32)

    def _merge_run(self, start: int, stop: int) -> None:
        if start in self._start_of:
            before = self._start_of[start]
            self._remove_run(before, start)
            start = before
        if stop in self._stop_of:
            after = self._stop_of[stop]
            self._remove_run(stop, after)
            stop = after
        self._add_run(start, stop)

    def _split_run(self, start: int, middle: int) -> None:
        stop = self._stop_of[start]
        self._remove_run(start, stop)
        self._add_run(start, middle)
        self._add_run(middle, stop)

    def _shorten_run(self, start: int, count: int) -> None:
        """Remove the first ``count`` blocks of a run. Its end stays, so only a changed size class moves its entry."""
        stop = self._stop_of.pop(start)
        before, after = (stop - start).bit_length(), (stop - start - count).bit_length()
        if before != after:
            del self._classes[before][stop]
        if after == 0:
            del self._start_of[stop]
            return
        if before != after:
            self._classes[after][stop] = None
        self._stop_of[start + count] = stop
        self._start_of[stop] = start + count

    def _add_run(self, start: int, stop: int) -> None:
        self._stop_of[start] = stop
        self._start_of[stop] = start
        size_class = (stop - start).bit_length()
        self._classes[size_class][stop] = None
        self._top_class = max(self._top_class, size_class)

    def _remove_run(self, start: int, stop: int) -> None:
        del self._stop_of[start]
        del self._start_of[stop]
        del self._classes[(stop - start).bit_length()][stop]
