"""A decoding batch in buffers of fixed size and place, as CUDA graphs need them.

A graph repeats its launches with the same addresses and grids. So rows are padded to the graph's size, and every tile class
gets room for as many items as a batch of that size is ever cut into; the items that are not there have no rows, and their
programs return at once::

    rows     | sequences ...            | position -1, slot -1 |
    items    | of the plan, longest first | empty ...          |
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from radixkv.attention.device_plan import DevicePlan
from radixkv.attention.gpu_cost_model import PROGRAMS_PER_MULTIPROCESSOR, tile_classes
from radixkv.attention.lowering import DeviceItems, HeadShape
from radixkv.attention.triton_backend import PartialResults, attend_layer
from radixkv.memory import KVPool
from radixkv_kernels import ITEM_FIELDS, TILE_ROWS

# Shared nodes lie above one another; so many levels of them fit, as long as each is full of rows.
_LEVELS = 4


@dataclass(slots=True)
class _Room:
    """The fixed buffers of one `HeadShape`."""

    by_tile: dict[int, torch.Tensor]
    starts: torch.Tensor
    partials: torch.Tensor

    def load(self, items: DeviceItems) -> bool:
        """Take over a plan's items; False, and nothing is taken, where they are more than there is room for."""
        if items.num_partials > len(self.partials) or any(
            tile not in self.by_tile or len(own) > len(self.by_tile[tile]) for tile, own in items.by_tile.items()
        ):
            return False
        for tile, room in self.by_tile.items():
            own = items.by_tile.get(tile)
            count = 0 if own is None else len(own)
            if own is not None:
                room[:count].copy_(own, non_blocking=True)
            room[count:].zero_()
        rows = len(items.starts)
        self.starts[:rows].copy_(items.starts, non_blocking=True)
        self.starts[rows:].fill_(items.num_partials)
        self.partials[: items.num_partials].copy_(items.partials, non_blocking=True)
        return True


class PaddedDecode:
    """One size of decoding batch; `load` a plan, then run the model's layers through `attend`.

    Args:
        num_rows: sequences, padding included.
        pool: where keys and values lie.
        flat: for plans that share nothing (`DevicePlan.is_flat`) only: a graph then has no launches of wide tiles, which
            would cost some microseconds a layer with nothing in them.
        partial_results: room that may be shared with other sizes, of which one runs at a time.

    Attributes:
        token_ids: int64 ``[num_rows]``, for the caller to fill.
        positions: int32 ``[num_rows]``; -1: padding.
        slots: int64 ``[num_rows]``; -1: padding.
        tables: int32 ``[tables, blocks]``, the planner's own, which never moves.
    """

    def __init__(self, num_rows: int, pool: KVPool, flat: bool, partial_results: PartialResults) -> None:
        device = pool.keys[0].device
        self.num_rows = num_rows
        self.flat = flat
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.positions = torch.full((num_rows,), -1, dtype=torch.int32, device=device)
        self.slots = torch.full((num_rows,), -1, dtype=torch.int64, device=device)
        self.tables = torch.empty(0, 0, dtype=torch.int32, device=device)
        self._pool = pool
        self._partials = partial_results
        self._rooms: dict[HeadShape, _Room] = {}
        self._plan: DevicePlan | None = None

    def load(self, plan: DevicePlan) -> bool:
        """Take over a batch of at most ``num_rows`` sequences; False where its items are more than there is room for."""
        if plan is not self._plan:
            self._plan = None
            if not all(room.load(plan.items(shape)) for shape, room in self._rooms.items()):
                return False
            self._plan = plan
            self.tables = plan.tables
            self.positions[plan.num_rows :].fill_(-1)
            self.slots[plan.num_rows :].fill_(-1)
        self.positions[: plan.num_rows].copy_(plan.positions, non_blocking=True)
        self.slots[: plan.num_rows].copy_(plan.slots, non_blocking=True)
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
        room = self._rooms.get(shape) or self._make_room(shape)
        items = DeviceItems(room.by_tile, room.starts, room.partials, len(room.partials))
        return attend_layer(
            self._pool, layer, query, key, value, self, items, self._partials,
            scale=scale, softcap=softcap, sliding_window=sliding_window, sinks=sinks,
        )  # fmt: skip

    def _make_room(self, shape: HeadShape) -> _Room:
        """Met for the first time, outside any graph.

        Room for as many items as fill the GPU, rounded up, which are pieces of long runs; and for the runs themselves: two
        narrow ones for each row, and as many wide ones as `_LEVELS` levels of nodes can have, for a tile is taken by those
        that do not fit the next narrower one. And for what the first batch needs, should that be more.
        """
        plan, rows = self._plan, self.num_rows
        assert plan is not None, "load comes first"
        device = self.token_ids.device
        most = np.ones(1, dtype=np.int64) if self.flat else np.arange(1, rows + 1)
        classes = [TILE_ROWS[i] for i in np.unique(tile_classes(most, shape.group, plan.dtype))]
        first = plan.items(shape)
        counts, num_partials, narrower = {}, 8 * rows, 0
        for tile in classes:
            full = -(-3 * plan.multiprocessors * PROGRAMS_PER_MULTIPROCESSOR[tile] // (2 * shape.num_kv_heads))
            runs = _LEVELS * -(-rows * shape.group // (narrower + 1)) if narrower else 2 * rows
            counts[tile] = max(full + runs, len(first.by_tile.get(tile, ())))
            num_partials += full * (1 if self.flat else min(rows, tile // shape.group))
            narrower = tile
        room = self._rooms[shape] = _Room(
            {tile: torch.zeros(n, ITEM_FIELDS, dtype=torch.int32, device=device) for tile, n in counts.items()},
            torch.zeros(rows + 1, dtype=torch.int32, device=device),
            # A power of two, so that different sizes of batches share partial results.
            torch.zeros(
                1 << (max(num_partials, first.num_partials) - 1).bit_length(), dtype=torch.int32, device=device
            ),
        )
        loaded = room.load(first)
        assert loaded, "room was made for it"
        return room
