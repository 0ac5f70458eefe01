"""A decoding batch in buffers of fixed size and address, as CUDA graphs need them.

A graph repeats its launches with the same addresses and grids. So rows are padded to the graph's size, and there is memory
for as many items as a batch of that size is ever cut into; items behind a batch's own have no rows, and their programs return
at once. Most batches have some rows that are split, so results are merged; only a whole batch, in which no row is split, has
a graph without a merge::

    rows            | sequences ...               | position -1, slot -1 |
    items           | of the batch, longest first | empty ...            |
    of a whole one  | one for each sequence       | one for each row of padding, which sees nothing and becomes 0 |
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv.attention.options import AttentionOptions
from radixkv.attention.triton.backend import TritonAttention, TritonBackend
from radixkv.attention.triton.cost_model import max_partials, max_pieces, max_tiles
from radixkv.attention.triton.launches import Launcher, LayerTensors, PartialResults, shared_launchers
from radixkv.attention.triton.layer_launches import LayerLaunches
from radixkv.attention.triton.work_items import DeviceItems, HeadShape, HostItems, WorkItems
from radixkv.memory.upload import aligned_starts, upload_into
from radixkv_kernels import ITEM_FIELDS, NO_PARTIAL


class _ItemBuffer:
    """Items of one `HeadShape` in one buffer, loaded with one copy.

    Args:
        num_rows: rows whose partial results are listed.
        max_partials: partial results of all these rows.
        whole: every row has one item, padding included.

    Attributes:
        items: what kernels are launched on, always ``max_items``.
    """

    def __init__(
        self, tile_rows: int, max_items: int, num_rows: int, max_partials: int, device: torch.device, whole: bool
    ) -> None:
        # The partial results come last, so that a copy can end where those in use end.
        sizes = [max_items * ITEM_FIELDS, num_rows + 1, max_partials]
        *starts, total = aligned_starts(sizes)
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        items, starts_part, partials = (
            self._buffer[start : start + size] for start, size in zip(starts, sizes, strict=True)
        )
        self.items: DeviceItems = WorkItems({tile_rows: items.view(-1, ITEM_FIELDS)}, starts_part, partials)
        self._tile_rows = tile_rows
        self._max_items = max_items
        _, self._starts_at, self._partials_at = starts
        self._whole_rows = num_rows if whole else 0
        if whole:  # nothing but padding
            self.load(WorkItems({}, np.zeros(1, dtype=np.int32), np.zeros(0, dtype=np.int32)))

    def holds(self, items: HostItems) -> bool:
        """Whether a batch's items, in tiles that are no wider, and their partial results fit."""
        return (
            items.num_partials <= self.items.num_partials
            and max(items.by_tile, default=0) <= self._tile_rows
            and items.num_items <= self._max_items
        )

    def load(self, items: HostItems) -> None:
        """Replace what is there by a batch's items; padding items have no rows, and padding rows no partial results."""
        values = np.zeros(self._partials_at + items.num_partials, dtype=np.int32)
        stop = 0
        for own in items.by_tile.values():
            values[stop : stop + own.size] = own.reshape(-1)
            stop += own.size
        padding = range(len(items.starts) - 1, self._whole_rows)
        if padding:
            empty = [number for row in padding for number in (row, 1, 0, 0, 0, NO_PARTIAL)]
            values[stop : stop + len(empty)] = empty
        values[self._starts_at : self._partials_at] = items.num_partials
        values[self._starts_at : self._starts_at + len(items.starts)] = items.starts
        values[self._partials_at :] = items.partials
        upload_into(self._buffer, values)


class PaddedDecode(LayerLaunches):
    """One size of decoding batch; `load` a batch, then run the model's layers through `attend`.

    Args:
        num_rows: padding included; as many as sequences, where none has drafts.
        wide: takes the widest tiles that so many decoding rows may need; otherwise the narrowest, for batches that share
            nothing, or whose prefixes few rows share.
        partial_results: memory that may be shared with other sizes, of which one runs at a time.
        whole: for batches that share nothing, and none of whose rows is split; then nothing is merged.

    Attributes:
        token_ids: int64 ``[num_rows]``, for the caller to fill.
        logit_rows: int64 ``[num_rows]``: of each token, in the query batch's order, its row in the packed batch.
        rows: the backend's own, which its next batch overwrites.
    """

    def __init__(
        self,
        num_rows: int,
        backend: TritonBackend,
        wide: bool,
        partial_results: PartialResults,
        whole: bool = False,
    ) -> None:
        super().__init__(backend.pool_layers)
        self.num_rows = num_rows
        self.wide = wide
        self.whole = whole
        device = backend.pool.keys[0].device
        self.token_ids = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self.logit_rows = torch.arange(num_rows, dtype=torch.int64, device=device)
        self.rows = backend.buffers.rows.first(num_rows)
        self._backend = backend
        self._partials = partial_results
        self._item_buffers: dict[HeadShape, _ItemBuffer] = {}
        self._batch: TritonAttention | None = None

    def load(self, batch: TritonAttention) -> bool:
        """Replace the batch by one of at most ``num_rows`` rows; False, and nothing done, where its items do not fit."""
        assert batch.buffers is self._backend.buffers, "a batch of another backend"
        if batch is not self._batch:
            items = [(buffer, batch.host_items(shape)) for shape, buffer in self._item_buffers.items()]
            if not all(buffer.holds(own) for buffer, own in items):
                return False
            for buffer, own in items:
                buffer.load(own)
            upload_into(self.logit_rows.view(torch.int32), batch.plan.rows_in_query_order().view(np.int32))
            self._batch = batch
        return True

    def launchers(self, tensors: LayerTensors, options: AttentionOptions) -> list[Launcher]:
        items = self.items(HeadShape.of(tensors.query, tensors.key))
        return shared_launchers(tensors, options, self.rows, self._backend.buffers.tables, items, self._partials)

    def items(self, shape: HeadShape) -> DeviceItems:
        """The items for layers of this shape; their buffer is allocated when first asked for, outside any graph.

        That must be before a batch is loaded. It has room for what any batch of its size may be cut into.
        """
        buffer = self._item_buffers.get(shape)
        if buffer is not None:
            return buffer.items
        assert self._batch is None, "a batch was loaded before there was room for its items"
        backend, num_rows = self._backend, self.num_rows
        counts = max_tiles(num_rows, shape.group, backend.dtype, backend.tiling)
        tile_rows = max(counts) if self.wide else min(counts)
        if not self.wide and len(counts) > 1:
            # Where nothing is shared, each row is a range of its own; the room for pieces is enough for most batches whose
            # prefixes few rows share, and the wide graph takes the others.
            counts = {tile_rows: num_rows}
        # A batch takes tiles of one class. Narrow tiles are cut into more pieces, because more of them run at once.
        num_items = max(
            count + max_pieces(rows, count, shape.num_kv_heads, backend.tiling) for rows, count in counts.items()
        )
        num_partials = max(
            max_partials(num_rows, {rows: count}, shape.group, shape.num_kv_heads, backend.tiling)
            for rows, count in counts.items()
        )
        if self.whole:
            num_items, num_partials = num_rows, 0
        buffer = self._item_buffers[shape] = _ItemBuffer(
            tile_rows, num_items, num_rows, num_partials, self.token_ids.device, self.whole
        )
        return buffer.items
