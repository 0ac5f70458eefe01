"""The plan of a batch as int32 buffers on a GPU, lowered once for all layers and kept while the batch only grows.

::

    chunks ── BatchTables: who shares what with whom ── runs of keys ── tiles x pieces ── work items ── device
                 kept from step to step                  (nodes, rests)                     one upload

While the same sequences take one token each, nothing is planned at all: their positions move on by a kernel, and tables
get the blocks that were added. Private rests are open at the end, so that items stay true however far they grow.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.batch_tables import BatchTables
from radixkv.attention.gpu_cost_model import flat_is_better, num_pieces, sharing_pays, tile_rows
from radixkv.attention.plan import QueryChunk, check_chunks
from radixkv_kernels import ITEM_FIELDS, NO_PARTIAL, OPEN_END, TILE_ROWS, advance_rows

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
            rows = int(tile_rows(np.ones(1, dtype=np.int64), shape.group, self.dtype)[0])
            pieces = num_pieces(lengths, np.ones_like(lengths), shape.num_kv_heads, rows, self.multiprocessors)
            splits = self.num_splits[shape] = int(pieces.max())
        return splits

    def _lower(self, shape: HeadShape) -> DeviceItems:
        runs = self.runs
        rows = tile_rows(runs.num_rows, shape.group, self.dtype)
        per_tile = rows // shape.group
        tiles = -(-runs.num_rows // per_tile)
        keys = runs.key_stop - runs.key_start
        pieces = np.ones_like(tiles)
        for tile_class in TILE_ROWS:
            own = rows == tile_class
            if own.any():
                pieces[own] = num_pieces(keys[own], tiles[own], shape.num_kv_heads, tile_class, self.multiprocessors)

        # Every run into tiles x pieces items.
        count = tiles * pieces
        run = np.repeat(np.arange(len(count)), count)
        number = np.arange(len(run)) - np.repeat(np.cumsum(count) - count, count)
        tile, piece = number // pieces[run], number % pieces[run]
        length = (keys + 16 * pieces - 1) // (16 * pieces) * 16
        items = np.empty((len(run), ITEM_FIELDS), dtype=np.int32)
        items[:, 0] = runs.row_start[run] + tile * per_tile[run]
        items[:, 1] = num_rows = np.minimum(per_tile[run], runs.num_rows[run] - tile * per_tile[run])
        items[:, 2] = runs.table[run]
        items[:, 3] = runs.key_start[run] + piece * length[run]
        stop = np.minimum(runs.key_start[run] + (piece + 1) * length[run], runs.key_stop[run])
        items[:, 4] = np.where((piece == pieces[run] - 1) & runs.is_open[run], OPEN_END, stop)

        # A row's only item writes the output itself; the others write partial results, numbered through.
        size = self.num_rows + 1
        borders = np.bincount(items[:, 0], minlength=size) - np.bincount(items[:, 0] + num_rows, minlength=size)
        direct = np.cumsum(borders)[items[:, 0]] == 1
        written = np.where(direct, 0, num_rows)
        first = np.cumsum(written) - written
        items[:, 5] = np.where(direct, NO_PARTIAL, first)
        num_partials = int(written.sum())
        offset = np.arange(num_partials) - np.repeat(first, written)
        row_of_partial = np.repeat(items[:, 0], written) + offset
        partials = np.argsort(row_of_partial, kind="stable").astype(np.int32)
        starts = np.zeros(size, dtype=np.int32)
        np.cumsum(np.bincount(row_of_partial, minlength=self.num_rows), out=starts[1:])

        # Longest first, so that no long item begins when the others are done.
        order = np.argsort(-(stop - items[:, 3]), kind="stable")
        classes = [(tile, items[order[rows[run][order] == tile]]) for tile in TILE_ROWS]
        buffers = [array for _, array in classes if len(array)] + [starts, partials]
        uploaded = upload(buffers, self.positions.device)
        by_tile = dict(zip([tile for tile, array in classes if len(array)], uploaded, strict=False))
        return DeviceItems(by_tile, uploaded[-2], uploaded[-1], num_partials)


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
        # What the next step must look like for the plan to be kept.
        self._owners: list[Hashable] = []
        self._versions: list[int] = []
        self._contexts: list[int] = []

    def plan(self, chunks: Sequence[QueryChunk]) -> DevicePlan:
        """The batch's plan; the same object as before, moved on, where the sequences only take one token more each.

        Raises:
            ValueError: there is no chunk, a chunk has no new token, its table does not reach to its last token, or there
                are more sequences or blocks than there is room for.
        """
        if self._plan is not None and self._is_next_step(chunks):
            self._tables.update(chunks)
            plan = self._plan
            advance_rows(plan.positions, plan.slots, plan.tables, plan.row_tables, block_size=self._block_size)
            self._contexts = [context + 1 for context in self._contexts]
            self._steps_left -= 1
            return plan
        check_chunks(chunks, self._block_size)
        self._plan = None
        self._tables.update(chunks)
        if len(self._tables.order) < len(chunks):
            raise ValueError("chunks: expected an owner for each, all different")
        self._plan = self._make(chunks)
        self._steps_left = _STEPS_A_PLAN
        self._owners = [chunk.owner for chunk in chunks]
        self._versions = [chunk.version for chunk in chunks]
        self._contexts = [chunk.num_context + chunk.num_new for chunk in chunks]
        return self._plan

    def _is_next_step(self, chunks: Sequence[QueryChunk]) -> bool:
        return (
            self._steps_left > 0
            and [chunk.num_context for chunk in chunks] == self._contexts
            and all(chunk.num_new == 1 for chunk in chunks)
            and [chunk.owner for chunk in chunks] == self._owners
            and [chunk.version for chunk in chunks] == self._versions
            and self._plan is not None
            and self._plan.num_rows == len(chunks)
        )

    def _make(self, chunks: Sequence[QueryChunk]) -> DevicePlan:
        size = self._block_size
        index_of = {chunk.owner: index for index, chunk in enumerate(chunks)}
        order = [index_of[owner] for owner in self._tables.order]
        table = np.array(self._tables.tables)
        context = np.array([chunks[i].num_context for i in order])
        num_new = np.array([chunks[i].num_new for i in order])
        row_start = np.concatenate(([0], np.cumsum(num_new)))
        sequence = np.repeat(np.arange(len(order)), num_new)
        positions = context[sequence] + np.arange(row_start[-1]) - row_start[sequence]
        slots = self._tables.host[table[sequence], positions // size].astype(np.int64) * size + positions % size

        nodes, private_from = _shared_nodes(self._tables.common, self._shape.group, size, self._element_bytes)
        decodes = bool((num_new == 1).all())
        saved = sum((stop - start - 1) * (key_stop - key_start) for start, stop, key_start, key_stop in nodes)
        flat = decodes and flat_is_better(saved, self._bytes_per_token)
        if flat:
            nodes, private_from = [], np.zeros(len(order), dtype=np.int64)
        first, last, key_start, key_stop = np.array(nodes, dtype=np.int64).reshape(-1, 4).T
        runs = _Runs(
            row_start=np.concatenate((row_start[first], row_start[:-1])),
            num_rows=np.concatenate((row_start[last] - row_start[first], num_new)),
            table=np.concatenate((table[first], table)),
            key_start=np.concatenate((key_start, private_from)),
            key_stop=np.concatenate((key_stop, context + num_new)),
            is_open=np.arange(len(nodes) + len(order)) >= len(nodes),
        )
        int_buffers = upload([positions.astype(np.int32), table[sequence].astype(np.int32)], self._device)
        return DevicePlan(
            order=order,
            row_starts=row_start.tolist(),
            positions=int_buffers[0],
            slots=torch.from_numpy(slots).to(self._device, non_blocking=True),
            tables=self._tables.device,
            row_tables=int_buffers[1],
            num_splits={} if flat else None,
            saved_tokens=0 if flat else saved,
            runs=runs,
            dtype=self._dtype,
            multiprocessors=self._multiprocessors,
        )


def _shared_nodes(
    common: Sequence[int], group: int, block_size: int, element_bytes: int
) -> tuple[list[tuple[int, int, int, int]], Ints]:
    """The nodes worth sharing as ``(first sequence, one past the last, first key, one past the last)``, parents first.

    Args:
        common: how many leading blocks neighbours have in common.

    Returns:
        The nodes, and for each sequence the first key that no node covers.
    """
    blocks = np.array(common, dtype=np.int64)
    nodes: list[tuple[int, int, int, int]] = []
    private_from = np.zeros(len(common) + 1, dtype=np.int64)
    pending = [(0, len(common) + 1, 0)]
    while pending:
        start, stop, depth = pending.pop()
        between = blocks[start : stop - 1]
        shared = int(between.min()) * block_size if stop - start > 1 else depth
        if shared > depth and sharing_pays(stop - start, shared - depth, group, element_bytes):
            nodes.append((start, stop, depth, shared))
            private_from[start:stop] = depth = shared
        # Below: the groups that stay together beyond the shortest common prefix.
        parting = np.flatnonzero(between * block_size == shared) + start + 1
        borders = np.concatenate(([start], parting, [stop]))
        together = np.flatnonzero(np.diff(borders) > 1)
        pending.extend((int(borders[i]), int(borders[i + 1]), depth) for i in together.tolist())
    return nodes, private_from


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in one copy."""
    packed = torch.from_numpy(np.concatenate([array.reshape(-1) for array in arrays])).to(device, non_blocking=True)
    return [
        part.view(array.shape)
        for part, array in zip(packed.split([array.size for array in arrays]), arrays, strict=True)
    ]
