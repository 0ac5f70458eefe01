"""Lowers a plan's ranges of keys to calls of torch's attention.

- keys in consecutive blocks are attended in place, as a view of the pool (`ViewCall`);
- keys in scattered blocks, and the short private tails of many decoding sequences at once, are gathered first (`GatherCall`);
- a prompt's new tokens attend to themselves causally, straight from what was written (`CausalCall`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.attention.plan import AttentionPlan, KeyRanges
from radixkv.attention.query_batch import Ints
from radixkv.attention.torch_cpu.cost_model import MIN_BATCH_FILL, view_pays
from radixkv.attention.torch_cpu.partial import Visibility


@dataclass(frozen=True, slots=True)
class ViewCall:
    """All ``rows`` over the consecutive token rows ``start .. stop`` of the pool.

    Attributes:
        first: whether this is the first result that these rows get; likewise in the other calls.
        visibility: None: every row sees every key.
    """

    rows: slice
    first: bool
    start: int
    stop: int
    visibility: Visibility | None


@dataclass(frozen=True, slots=True)
class GatherCall:
    """Each row over keys of its own, or all rows over the same keys.

    Attributes:
        slots: int64 ``[sequences, keys]``: the pool's token rows that hold each sequence's keys.
        visibility: None: every row sees every key.
    """

    rows: slice | torch.Tensor
    first: bool
    slots: torch.Tensor
    visibility: Visibility | None


@dataclass(frozen=True, slots=True)
class CausalCall:
    """The rows over themselves.

    Attributes:
        visibility: only where a sliding window cuts the triangle.
    """

    rows: slice
    first: bool
    visibility: Visibility | None


Call = ViewCall | GatherCall | CausalCall


def lower(plan: AttentionPlan, window: int | None) -> list[Call]:
    """The calls for layers with this sliding window; those of each row are in the order of its keys."""
    lowering = _Lowering(plan, window)
    return [*lowering.prefixes_and_prompts(), *lowering.tails()]


class _Lowering:
    """One plan's calls for one sliding window; notes which rows have a result already."""

    def __init__(self, plan: AttentionPlan, window: int | None) -> None:
        self._plan = plan
        self._window = window
        self._ranges: KeyRanges = plan.ranges
        self._covered = np.zeros(plan.num_rows, dtype=np.bool_)
        # A range of one row is a private tail of a single new token, which may be gathered with others.
        self._is_tail = plan.ranges.row_stop - plan.ranges.row_start == 1

    def prefixes_and_prompts(self) -> Iterator[Call]:
        """Shared prefixes, and prompts: the new tokens over the keys before them, then over themselves."""
        ranges, num_shared = self._ranges, self._ranges.num_shared
        (others,) = (~self._is_tail).nonzero()
        columns = ranges.row_start, ranges.row_stop, ranges.table, ranges.key_start, ranges.key_stop
        selected = np.stack((others, *(column[others] for column in columns)), axis=1)
        for index, row_start, row_stop, table, start, stop in selected.tolist():
            rows = slice(row_start, row_stop)
            num_new = 0 if index < num_shared else row_stop - row_start
            if start < stop - num_new:
                yield from self._over_keys(table, rows, start, stop - num_new)
            if num_new:
                yield CausalCall(rows, self._cover(rows), _causal_window(num_new, self._window))

    def tails(self) -> Iterator[Call]:
        """Private tails: long ones in place, the others gathered with those of about their length."""
        ranges, window = self._ranges, self._window
        (tails,) = self._is_tail.nonzero()
        starts, lengths = ranges.key_start[tails], ranges.key_stop[tails] - ranges.key_start[tails]
        if window is not None:
            lengths = np.minimum(lengths, window)
            starts = ranges.key_stop[tails] - lengths
        longest_first = (-lengths).argsort(kind="stable")
        tails, starts, lengths = tails[longest_first], starts[longest_first], lengths[longest_first]
        at = 0
        while at < len(tails):
            longest = int(lengths[at])
            end = at + int((-lengths[at:]).searchsorted(-MIN_BATCH_FILL * longest, side="right"))
            if end - at == 1 or view_pays(1, longest):
                for tail, start in zip(tails[at:end].tolist(), starts[at:end].tolist(), strict=True):
                    row = int(ranges.row_start[tail])
                    yield from self._over_keys(
                        int(ranges.table[tail]), slice(row, row + 1), start, int(ranges.key_stop[tail])
                    )
            else:
                in_row_order = at + ranges.row_start[tails[at:end]].argsort()
                yield self._gathered(tails[in_row_order], starts[in_row_order], lengths[in_row_order])
            at = end

    def _over_keys(self, table: int, rows: slice, start: int, stop: int) -> Iterator[Call]:
        """All rows over the keys ``start .. stop``: views of consecutive blocks where they are long, one gather where not."""
        visibility = None
        if self._window is not None:
            lowest = self._plan.positions[rows] - self._window + 1
            start = max(start, int(lowest.min()))
            if start < lowest.max():
                visibility = Visibility(torch.from_numpy(np.arange(start, stop)[None, :] >= lowest[:, None]))
        if start >= stop:
            return
        slots = self._slots(table, start, stop)
        breaks = np.flatnonzero(np.diff(slots) != 1) + 1
        first = self._cover(rows)
        if len(breaks) and not view_pays(len(breaks) + 1, len(slots)):
            yield GatherCall(rows, first, torch.from_numpy(slots).unsqueeze(0), visibility)
            return
        for low, high in itertools.pairwise([0, *breaks.tolist(), len(slots)]):
            part = None if visibility is None else visibility.keys(low, high)
            yield ViewCall(rows, first and low == 0, int(slots[low]), int(slots[high - 1]) + 1, part)

    def _gathered(self, tails: Ints, starts: Ints, lengths: Ints) -> GatherCall:
        """One batch of tails, the shorter ones padded; their query rows ascend."""
        size, longest = self._plan.block_size, int(lengths.max())
        offsets = np.arange(longest)
        exists = offsets < lengths[:, None]
        # Padding repeats a sequence's own first key, never memory that was not written.
        positions = starts[:, None] + offsets * exists
        blocks = self._plan.block_ids[self._ranges.table[tails][:, None], positions // size]
        slots = blocks.astype(np.int64) * size + positions % size
        visibility = None
        if lengths.min() < longest:
            visibility = Visibility(torch.from_numpy(exists[:, None, :]))
        row_ids = self._ranges.row_start[tails]
        first_row, last_row = int(row_ids[0]), int(row_ids[-1])
        consecutive = last_row - first_row == len(row_ids) - 1
        rows = slice(first_row, last_row + 1) if consecutive else torch.from_numpy(row_ids)
        return GatherCall(rows, self._cover(row_ids), torch.from_numpy(slots), visibility)

    def _cover(self, rows: slice | Ints) -> bool:
        """Note that rows get a result; True: none of them had one before."""
        first = not self._covered[rows].any()
        self._covered[rows] = True
        return first

    def _slots(self, table: int, start: int, stop: int) -> Ints:
        """The pool's token rows of the keys ``start .. stop``."""
        size = self._plan.block_size
        low = start // size
        blocks = self._plan.block_ids[table, low : -(-stop // size)].astype(np.int64)
        slots: Ints = (blocks[:, None] * size + np.arange(size)).reshape(-1)
        return slots[start - low * size : stop - low * size]


def _causal_window(num_rows: int, window: int | None) -> Visibility | None:
    if window is None or num_rows <= window:
        return None
    triangle = torch.ones(num_rows, num_rows, dtype=torch.bool).tril_()
    return Visibility(triangle.triu_(1 - window))
