"""The plan of a batch as int32 buffers on a GPU, lowered once for all layers and kept while the batch only grows.

::

    chunks ── BatchTables: who shares what with whom ── runs of keys ── tiles x pieces ── work items ── device
                 kept from step to step                  (nodes, rests)                     one upload

While the same sequences take one token each, nothing is planned at all: their positions move on by a kernel, and tables
get the blocks that were added. Private rests are open at the end, so that items stay true however far they grow.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.batch_tables import BatchColumns, BatchTables
from radixkv.attention.gpu_cost_model import flat_is_better, num_pieces, sharing_pays, tile_rows
from radixkv.attention.plan import QueryChunk, check_chunks
from radixkv.memory.upload import to_device
from radixkv_kernels import NO_PARTIAL, OPEN_END, TILE_ROWS, advance_rows

Ints = NDArray[np.int64]

# Rests grow while the plan is kept, and with them the longest piece. After so many tokens it is made anew.
_STEPS_A_PLAN = 512


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What of a layer's heads decides how its work is cut: layers of one shape share their items."""

    num_kv_heads: int
    group: int


@dataclass(frozen=True, slots=True)
class DeviceItems:
    """All work items of a batch for one `HeadShape`.

    Attributes:
        by_tile: int32 ``[items, ITEM_FIELDS]`` by tile rows, longest first.
        starts, partials: which partial results each row merges, see `radixkv_kernels.merge_partials`.
        num_partials: rows of partial results that the items write.
    """

    by_tile: dict[int, torch.Tensor]
    starts: torch.Tensor
    partials: torch.Tensor
    num_partials: int


@dataclass(slots=True)
class _Runs:
    """Ranges of keys with the rows that read them: shared nodes first, then every sequence's rest. Arrays, one a field."""

    row_start: Ints
    num_rows: Ints
    table: Ints
    key_start: Ints
    key_stop: Ints  # of the longest row
    is_open: NDArray[np.bool_]


@dataclass(slots=True)
class DevicePlan:
    """One batch's work.

    Attributes:
        order: chunk indices in the order in which their rows stand in the packed batch.
        row_starts: ``[chunks + 1]``: the rows of the chunk ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        positions: int32 ``[rows]`` on the device.
        slots: int64 ``[rows]`` on the device: where each row's key and value go.
        tables: int32 ``[tables, blocks]`` on the device.
        row_tables: int32 ``[rows]`` on the device.
        num_splits: not None: the batch decodes and shares too little to matter; each row's keys in so many parts.
        saved_tokens: keys that sharing saves reading, a layer.
    """

    order: list[int]
    row_starts: list[int]
    positions: torch.Tensor
    slots: torch.Tensor
    tables: torch.Tensor
    row_tables: torch.Tensor
    num_splits: dict[HeadShape, int] | None
    saved_tokens: int
    runs: _Runs
    dtype: torch.dtype
    multiprocessors: int
    _items: dict[HeadShape, DeviceItems] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def is_flat(self) -> bool:
        """Whether every row reads all its keys alone."""
        return self.num_splits is not None

    def items(self, shape: HeadShape) -> DeviceItems:
        """The work items for layers of this shape, lowered when first asked for."""
        items = self._items.get(shape)
        if items is None:
            items = self._items[shape] = self._lower(shape)
        return items

    def splits(self, shape: HeadShape) -> int | None:
        """Parts of each row's keys, where the flat path is taken; None: take the items."""
        if self.num_splits is None:
            return None
        splits = self.num_splits.get(shape)
        if splits is None:
            lengths = self.runs.key_stop - self.runs.key_start
            ones = np.ones_like(lengths)
            rows = tile_rows(ones, shape.group, self.dtype)
            pieces = num_pieces(lengths, ones, shape.num_kv_heads, rows, self.multiprocessors)
            splits = self.num_splits[shape] = int(pieces.max())
        return splits

    def _lower(self, shape: HeadShape) -> DeviceItems:
        runs = self.runs
        rows = tile_rows(runs.num_rows, shape.group, self.dtype)
        per_tile = rows // shape.group
        tiles = -(-runs.num_rows // per_tile)
        keys = runs.key_stop - runs.key_start
        pieces = num_pieces(keys, tiles, shape.num_kv_heads, rows, self.multiprocessors)

        # In lengths of whole 16 keys fewer pieces may do. One that begins behind the last key must not be: the open end would
        # be its own, and new keys in between nobody's.
        length = -(-keys // (16 * pieces)) * 16
        pieces = -(-keys // length)

        # Every run into tiles x pieces items; what is known of a run is repeated for each of them.
        count = tiles * pieces
        before = np.cumsum(count) - count
        of_runs = [
            runs.row_start, runs.num_rows, runs.table, runs.key_start, runs.key_stop, runs.is_open,
            rows, per_tile, pieces, length, before,
        ]  # fmt: skip
        (
            run_row, run_rows, table, key_start, key_stop, is_open,
            tile_class, per_tile, pieces, length, before,
        ) = np.array(of_runs).repeat(count, axis=1)  # fmt: skip
        tile, piece = np.divmod(np.arange(len(before)) - before, pieces)
        row = run_row + tile * per_tile
        num_rows = np.minimum(per_tile, run_rows - tile * per_tile)
        start = key_start + piece * length
        stop = np.minimum(start + length, key_stop)

        # A row's only item writes the output itself; the others write partial results, numbered through.
        size = self.num_rows + 1
        borders = np.bincount(row, minlength=size) - np.bincount(row + num_rows, minlength=size)
        direct = np.cumsum(borders)[row] == 1
        written = np.where(direct, 0, num_rows)
        ends = np.cumsum(written)
        first = ends - written
        num_partials = int(ends[-1])
        row_of_partial = np.repeat(row - first, written) + np.arange(num_partials)
        partials = np.argsort(row_of_partial, kind="stable").astype(np.int32)
        starts = np.zeros(size, dtype=np.int32)
        np.cumsum(np.bincount(row_of_partial, minlength=self.num_rows), out=starts[1:])

        # By tile class, and longest first, so that no long item begins when the others are done.
        order = np.argsort((tile_class << 32) + start - stop, kind="stable")
        end = np.where(is_open.astype(bool) & (piece == pieces - 1), OPEN_END, stop)
        items = np.array([row, num_rows, table, start, end, np.where(direct, NO_PARTIAL, first)], dtype=np.int32).T[
            order
        ]
        sizes = np.bincount(rows, weights=count, minlength=max(TILE_ROWS) + 1)[list(TILE_ROWS)].astype(np.int64)
        classes = np.split(items, np.cumsum(sizes)[:-1])
        *parts, starts_there, partials_there = upload([*classes, starts, partials], self.positions.device)
        by_tile = {tile: part for tile, part in zip(TILE_ROWS, parts, strict=True) if len(part)}
        return DeviceItems(by_tile, starts_there, partials_there, num_partials)


class DevicePlanner:
    """Plans batch after batch over one pool.

    Args:
        max_sequences: in a batch.
        max_blocks: of a sequence.
        block_size: tokens a block.
        shape: of most layers' heads, by which sharing is weighed.
        bytes_per_token: of a token's keys and values in one layer.
        element_bytes: of one of their elements.
        dtype: of queries.
        device: where the buffers go.
        multiprocessors: of the device.
    """

    def __init__(
        self,
        *,
        max_sequences: int,
        max_blocks: int,
        block_size: int,
        shape: HeadShape,
        bytes_per_token: int,
        element_bytes: int,
        dtype: torch.dtype,
        device: torch.device,
        multiprocessors: int,
    ) -> None:
        self._tables = BatchTables(max_sequences, max_blocks, device)
        self._block_size = block_size
        self._shape = shape
        self._bytes_per_token = bytes_per_token
        self._element_bytes = element_bytes
        self._dtype = dtype
        self._device = device
        self._multiprocessors = multiprocessors
        self._plan: DevicePlan | None = None
        self._steps_left = 0
        # Of the last batch: the next one must continue it for the plan to be kept.
        self._columns: BatchColumns | None = None

    def plan(self, chunks: Sequence[QueryChunk]) -> DevicePlan:
        """The batch's plan; the same object as before, moved on, where the sequences only take one token more each.

        Raises:
            ValueError: there is no chunk, a chunk has no new token, its table does not reach to its last token, or there
                are more sequences or blocks than there is room for.
        """
        columns = BatchColumns(chunks)
        if self._plan is not None and self._is_next_step(columns):
            self._tables.update(chunks, columns)
            plan = self._plan
            advance_rows(plan.positions, plan.slots, plan.tables, plan.row_tables, block_size=self._block_size)
            self._columns = columns
            self._steps_left -= 1
            return plan
        room = columns.num_blocks * self._block_size - columns.context - columns.num_new
        if not chunks or not ((room >= 0) & (columns.num_new > 0) & (columns.context >= 0)).all():
            check_chunks(chunks, self._block_size)
        self._plan = None
        self._tables.update(chunks, columns)
        self._plan = self._make(columns)
        self._steps_left = _STEPS_A_PLAN
        self._columns = columns
        return self._plan

    def _is_next_step(self, columns: BatchColumns) -> bool:
        last = self._columns
        return (
            last is not None
            and self._steps_left > 0
            and columns.has_members_of(last)
            # Every sequence has one row in the plan, whose position only has to move on.
            and bool((last.num_new == 1).all() and (columns.num_new == 1).all())
            and np.array_equal(columns.context, last.context + 1)
        )

    def _make(self, columns: BatchColumns) -> DevicePlan:
        size = self._block_size
        table = np.array(self._tables.tables)
        order = self._tables.chunk_of(table)
        context = columns.context[order]
        num_new = columns.num_new[order]
        row_start = np.concatenate(([0], np.cumsum(num_new)))
        sequence = np.repeat(np.arange(len(order)), num_new)
        positions = context[sequence] + np.arange(row_start[-1]) - row_start[sequence]
        slots = self._tables.host[table[sequence], positions // size].astype(np.int64) * size + positions % size

        nodes, private_from = _shared_nodes(self._tables.common, self._shape.group, size, self._element_bytes)
        decodes = bool((num_new == 1).all())
        first, last, key_start, key_stop = nodes
        saved = int(((last - first - 1) * (key_stop - key_start)).sum())
        flat = decodes and flat_is_better(saved, self._bytes_per_token)
        if flat:
            first, last, key_start, key_stop = nodes[:, :0]
            private_from = np.zeros(len(order), dtype=np.int64)
        runs = _Runs(
            row_start=np.concatenate((row_start[first], row_start[:-1])),
            num_rows=np.concatenate((row_start[last] - row_start[first], num_new)),
            table=np.concatenate((table[first], table)),
            key_start=np.concatenate((key_start, private_from)),
            key_stop=np.concatenate((key_stop, context + num_new)),
            is_open=np.arange(len(first) + len(order)) >= len(first),
        )
        int_buffers = upload([positions.astype(np.int32), table[sequence].astype(np.int32)], self._device)
        return DevicePlan(
            order=order.tolist(),
            row_starts=row_start.tolist(),
            positions=int_buffers[0],
            slots=to_device(torch.from_numpy(slots), self._device),
            tables=self._tables.device,
            row_tables=int_buffers[1],
            num_splits={} if flat else None,
            saved_tokens=0 if flat else saved,
            runs=runs,
            dtype=self._dtype,
            multiprocessors=self._multiprocessors,
        )


def _shared_nodes(common: Sequence[int], group: int, block_size: int, element_bytes: int) -> tuple[Ints, Ints]:
    """The nodes worth sharing, parents first.

    Args:
        common: how many leading blocks neighbours have in common.

    Returns:
        ``[4, nodes]``: first sequence, one past the last, first key, one past the last; and for each sequence the first key
        that no node covers.
    """
    nodes: list[int] = []
    private_from = [0] * (len(common) + 1)
    for start, stop, shared_blocks in reversed(_common_intervals(common)):
        # Who is an ancestor of this one has been here before it.
        depth, shared = private_from[start], shared_blocks * block_size
        if sharing_pays(stop - start, shared - depth, group, element_bytes):
            nodes += (start, stop, depth, shared)
            private_from[start:stop] = [shared] * (stop - start)
    return np.array(nodes, dtype=np.int64).reshape(-1, 4).T, np.array(private_from, dtype=np.int64)


def _common_intervals(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """All largest groups of neighbours ``(first, one past the last, leading blocks in common)``, children before parents.

    In one pass with a stack of the groups that are still open (Abouelhoda, Kurtz and Ohlebusch 2004: the intervals of an
    array of longest common prefixes).
    """
    found: list[tuple[int, int, int]] = []
    below: list[tuple[int, int]] = []
    start, depth = 0, 0
    for place, blocks in enumerate(itertools.chain(common, (0,))):
        if blocks > depth:
            below.append((start, depth))
            start, depth = place, blocks
        while blocks < depth:
            found.append((start, place + 1, depth))
            if below[-1][1] < blocks:
                depth = blocks  # begins where the one that ends here does
            else:
                start, depth = below.pop()
    return found


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in one copy; each begins on 16 bytes: for any that does not, kernels are compiled again."""
    stops = np.cumsum([-(-array.size // 4) * 4 for array in arrays]).tolist()
    starts = [0, *stops[:-1]]
    packed = np.zeros(stops[-1], dtype=np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    there = to_device(torch.from_numpy(packed), device)
    return [there[start : start + array.size].view(array.shape) for start, array in zip(starts, arrays, strict=True)]
