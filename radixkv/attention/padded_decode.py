"""A decoding batch in buffers of fixed size and place, as CUDA graphs need them.

A graph repeats its launches with the same addresses and grids. So rows are padded to the graph's size, and every tile class
gets room for as many items as a batch of that size is ever cut into; the items that are not there have no rows, and their
programs return at once::

    rows     | sequences ...            | position -1, slot -1 |
    items    | of the plan, longest first | empty ...          |
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv.attention.batch_buffers import BatchBuffers
from radixkv.attention.device_plan import DevicePlan
from radixkv.attention.gpu_cost_model import PROGRAMS_PER_MULTIPROCESSOR, tile_classes
from radixkv.attention.lowering import DeviceItems, HeadShape, HostItems
from radixkv.attention.triton_backend import PartialResults, attend_layer
from radixkv.memory import KVPool
from radixkv.memory.upload import aligned_starts, upload_into
from radixkv_kernels import ITEM_FIELDS, TILE_ROWS

# Shared nodes lie above one another; so many levels of them fit, as long as each is full of rows.
_LEVELS = 4


class _Room:
    """Items of one `HeadShape` in one buffer, loaded with one copy.

    Args:
        most_items: by tile rows.
        num_rows: whose partial results are listed.
        most_partials: of all of them.
        device: of the buffer.

    Attributes:
        items: what kernels are launched on: as many as there can be.
    """

    def __init__(self, most_items: dict[int, int], num_rows: int, most_partials: int, device: torch.device) -> None:
        # What is used of the partial results is at the end of what is copied.
        sizes = [*(count * ITEM_FIELDS for count in most_items.values()), num_rows + 1, most_partials]
        *starts, total = aligned_starts(sizes)
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        *by_tile, starts_part, partials = (
            self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)
        )
        self.items = DeviceItems(
            {tile: part.view(-1, ITEM_FIELDS) for tile, part in zip(most_items, by_tile, strict=True)},
            starts_part,
            partials,
            most_partials,
        )
        self._tile_starts = dict(zip(most_items, starts, strict=False))
        self._starts_at, self._partials_at = starts[-2:]

    def has_room_for(self, items: HostItems) -> bool:
        """Whether a plan's items, of every tile class, and their partial results fit."""
        by_tile = self.items.by_tile
        return items.num_partials <= self.items.num_partials and all(
            tile in by_tile and len(own) <= len(by_tile[tile]) for tile, own in items.by_tile.items()
        )

    def load(self, items: HostItems) -> None:
        """Take over a plan's items; those that are not there have no rows, and rows that are not there no partial results."""
        values = np.zeros(self._partials_at + items.num_partials, dtype=np.int32)
        for tile, own in items.by_tile.items():
            start = self._tile_starts[tile]
            values[start : start + own.size] = own.reshape(-1)
        values[self._starts_at : self._partials_at] = items.num_partials
        values[self._starts_at : self._starts_at + len(items.starts)] = items.starts
        values[self._partials_at :] = items.partials
        upload_into(self._buffer, values)


class PaddedDecode:
    """One size of decoding batch; `load` a plan, then run the model's layers through `attend`.

    Args:
        num_rows: sequences, padding included.
        pool: where keys and values lie.
        buffers: of the planner whose plans are loaded.
        flat: for plans that share nothing (`DevicePlan.is_flat`) only: a graph then has no launches of wide tiles, which
            would cost some microseconds a layer with nothing in them.
        partial_results: room that may be shared with other sizes, of which one runs at a time.

    Attributes:
        token_ids: int64 ``[num_rows]``, for the caller to fill.
        rows: the planner's own, which its next plan overwrites.
    """

    def __init__(
        self, num_rows: int, pool: KVPool, buffers: BatchBuffers, flat: bool, partial_results: PartialResults
    ) -> None:
        self.num_rows = num_rows
        self.flat = flat
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=pool.keys[0].device)
        self.rows = buffers.rows.first(num_rows)
        self._pool = pool
        self._buffers = buffers
        self._partials = partial_results
        self._rooms: dict[HeadShape, _Room] = {}
        self._plan: DevicePlan | None = None

    def load(self, plan: DevicePlan) -> bool:
        """Take over a batch of at most ``num_rows`` sequences; False where its items are more than there is room for."""
        assert plan.buffers is self._buffers, "a plan of another planner"
        if plan is not self._plan:
            items = [(room, plan.host_items(shape)) for shape, room in self._rooms.items()]
            if not all(room.has_room_for(own) for room, own in items):
                return False
            for room, own in items:
                room.load(own)
            self._plan = plan
        return True

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend; see `AttentionBatch.attend`."""
        shape = HeadShape(key.shape[1], query.shape[1] // key.shape[1])
        room = self._rooms.get(shape)
        items = room.items if room else self.make_room(shape)
        return attend_layer(
            self._pool, layer, query, key, value, self.rows, self._buffers.tables, items, self._partials,
            scale=scale, softcap=softcap, sliding_window=sliding_window, sinks=sinks,
        )  # fmt: skip

    def make_room(self, shape: HeadShape) -> DeviceItems:
        """The buffers for items of layers of this shape, met for the first time, outside any graph.

        Room for as many items as fill the GPU, rounded up, which are pieces of long runs; and for the runs themselves: two
        narrow ones for each row, and as many wide ones as `_LEVELS` levels of nodes can have, for a tile is taken by those
        that do not fit the next narrower one. And for what the first batch needs, should that be more.
        """
        plan, rows = self._plan, self.num_rows
        assert plan is not None, "load comes first"
        most = np.ones(1, dtype=np.int64) if self.flat else np.arange(1, rows + 1)
        classes = [TILE_ROWS[i] for i in np.unique(tile_classes(most, shape.group, plan.dtype))]
        first = plan.host_items(shape)
        counts, num_partials, narrower = {}, 8 * rows, 0
        for tile in classes:
            full = -(-3 * plan.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile] // (2 * shape.num_kv_heads))
            runs = _LEVELS * -(-rows * shape.group // (narrower + 1)) if narrower else 2 * rows
            counts[tile] = max(full + runs, len(first.by_tile.get(tile, ())))
            num_partials += full * (1 if self.flat else min(rows, tile // shape.group))
            narrower = tile
        # A power of two, so that different sizes of batches share partial results.
        most_partials = 1 << (max(num_partials, first.num_partials) - 1).bit_length()
        room = self._rooms[shape] = _Room(counts, rows, most_partials, self.token_ids.device)
        room.load(first)
        return room.items
