"""Lowers a plan's ranges of keys to work items: how a batch's attention is cut for layers of one head shape.

::

    range                                     work items: tiles of rows x pieces of keys
    prefix, rows 0 .. 40, keys 0 .. 3500      rows 0 .. 32 and 32 .. 40, keys 0 .. 1760 and 1760 .. 3500
    tail, row 2, keys 3500 .. and further     row 2, keys 3500 ..
    prompt, rows 3 .. 67, keys 0 .. 64        rows 3 .. 35, keys 0 .. 32, and rows 35 .. 67, keys 0 .. 64

The last item of a private tail is open at the end: it stays valid however far the sequence grows. The last keys of a prompt
are those of its own rows; its tiles have no items over keys that none of their rows sees.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.plan import KeyRanges
from radixkv.attention.query_batch import Ints
from radixkv.attention.triton.cost_model import Tiling, num_pieces, tile_classes
from radixkv.memory.upload import upload
from radixkv_kernels import ITEM_FIELDS, NO_PARTIAL, OPEN_END, TILE_ROWS

_TILE_ROWS = np.array(TILE_ROWS)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """The properties of a layer's heads that decide how its work is cut; layers of one shape share their items."""

    num_kv_heads: int
    group: int

    @classmethod
    def of(cls, query: torch.Tensor, key: torch.Tensor) -> HeadShape:
        """The shape of queries and keys of ``[rows, heads, dim]``."""
        return cls(key.shape[1], query.shape[1] // key.shape[1])


Array = TypeVar("Array", torch.Tensor, NDArray[np.int32])


@dataclass(frozen=True, slots=True)
class WorkItems(Generic[Array]):
    """All work items of a batch for one `HeadShape`, int32, on the host or on the device.

    Attributes:
        by_tile: ``[items, ITEM_FIELDS]`` by tile rows, longest first.
        starts: where each row's part of ``partials`` begins, see `radixkv_kernels.merge_partials`.
        partials: which partial results each row merges: all that the items write.
    """

    by_tile: dict[int, Array]
    starts: Array
    partials: Array

    @property
    def num_partials(self) -> int:
        return len(self.partials)

    @property
    def num_items(self) -> int:
        """Items of all tile classes."""
        return sum(map(len, self.by_tile.values()))


HostItems = WorkItems[NDArray[np.int32]]
DeviceItems = WorkItems[torch.Tensor]


def upload_items(items: HostItems, device: torch.device) -> DeviceItems:
    """The items in memory of their own on the device, in one copy."""
    *by_tile, starts, partials = upload([*items.by_tile.values(), items.starts, items.partials], device)
    return WorkItems(dict(zip(items.by_tile, by_tile, strict=True)), starts, partials)


@dataclass(frozen=True, slots=True)
class _Cuts:
    """How each range is cut; all columns are int64 ``[ranges]``.

    Attributes:
        tile_class: index into `TILE_ROWS`.
        tile_rows: query rows of a tile, each with all heads of a group.
        piece_keys: multiples of 16, so that blocks are read whole.
    """

    tile_class: Ints
    tile_rows: Ints
    num_tiles: Ints
    num_pieces: Ints
    piece_keys: Ints


def lower(ranges: KeyRanges, shape: HeadShape, dtype: torch.dtype, tiling: Tiling) -> HostItems:
    """The work items for layers of this shape."""
    cuts = _cut(ranges, shape, dtype, tiling)
    # The range of each item: a range has one item for each of its tiles x pieces.
    count = cuts.num_tiles * cuts.num_pieces
    of = np.arange(len(count)).repeat(count)
    tile, piece = divmod(np.arange(len(of)) - (count.cumsum() - count)[of], cuts.num_pieces[of])
    row = ranges.row_start[of] + tile * cuts.tile_rows[of]
    row_stop = np.minimum(row + cuts.tile_rows[of], ranges.row_stop[of])
    start = ranges.key_start[of] + piece * cuts.piece_keys[of]
    # One past the last key that a row of the tile sees: in a private tail, its last row itself.
    is_tail = of >= ranges.num_shared
    seen_stop = ranges.key_stop[of] - np.where(is_tail, ranges.row_stop[of] - row_stop, 0)
    in_sight = start < seen_stop
    if not in_sight.all():
        of, row, row_stop, start, seen_stop, is_tail = (
            column[in_sight] for column in (of, row, row_stop, start, seen_stop, is_tail)
        )
    num_rows = row_stop - row
    stop = np.minimum(start + cuts.piece_keys[of], seen_stop)

    # A tail in one piece, with no prefix before it, is all that its rows read. The other items write partial results.
    ends = is_tail & (stop == seen_stop)
    alone = ends & (start == 0)
    written = np.where(alone, 0, num_rows)
    first_partial: Ints = written.cumsum() - written
    starts, partials = _partials_of_rows(ranges.row_stop[-1], row, first_partial, written)

    items = np.empty((len(of), ITEM_FIELDS), dtype=np.int32)
    items[:, 0] = row
    items[:, 1] = num_rows
    items[:, 2] = ranges.table[of]
    items[:, 3] = start
    items[:, 4] = np.where(ends, OPEN_END, stop)
    items[:, 5] = np.where(alone, NO_PARTIAL, first_partial)
    # By tile class, and longest first, so that no long item starts when the others are done.
    tile_class = cuts.tile_class[of]
    items = items.take(((tile_class << 32) + start - stop).argsort(kind="stable"), axis=0)
    sizes = np.bincount(tile_class, minlength=len(TILE_ROWS)).tolist()
    by_tile = {
        rows: items[end - size : end]
        for rows, size, end in zip(TILE_ROWS, sizes, itertools.accumulate(sizes), strict=True)
        if size
    }
    return WorkItems(by_tile, starts, partials)


def _cut(ranges: KeyRanges, shape: HeadShape, dtype: torch.dtype, tiling: Tiling) -> _Cuts:
    rows = ranges.row_stop - ranges.row_start
    keys = ranges.key_stop - ranges.key_start
    tile_class = tile_classes(rows, shape.group, dtype, tiling)
    tile_rows = (_TILE_ROWS // shape.group)[tile_class]
    tiles = -(-rows // tile_rows)
    work = tiles * keys
    # Each tile of a private tail ends at its own last row.
    unseen = tiles * rows - rows - tile_rows * (tiles * (tiles - 1) // 2)
    work[ranges.num_shared :] -= unseen[ranges.num_shared :]
    pieces = num_pieces(keys, tiles, work, shape.num_kv_heads, tile_class, tiling)
    # In multiples of 16 keys fewer pieces may do. None may begin behind the last key: it would have the open end, and new
    # keys before its beginning would belong to no item.
    piece_keys = -(-keys // (16 * pieces)) * 16
    return _Cuts(tile_class, tile_rows, tiles, -(-keys // piece_keys), piece_keys)


def _partials_of_rows(
    num_rows: int, row: Ints, first_partial: Ints, written: Ints
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which partial results each row merges, in the form of `DeviceItems`.

    Args:
        row: each item's first row.
        first_partial: the partial result of each item's first row.
        written: for how many rows each item writes a partial result.
    """
    row_of_partial = (row - first_partial).repeat(written)
    row_of_partial += np.arange(len(row_of_partial))
    starts = np.zeros(num_rows + 1, dtype=np.int64)
    np.bincount(row_of_partial, minlength=num_rows).cumsum(out=starts[1:])
    # numpy sorts 16-bit integers by radix, which takes half the time.
    narrow = row_of_partial.astype(np.min_scalar_type(num_rows))
    return starts.astype(np.int32), narrow.argsort(kind="stable").astype(np.int32)
