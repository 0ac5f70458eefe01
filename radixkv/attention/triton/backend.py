"""The plan carried out by Triton kernels, on a GPU or in Triton's interpreter.

A step in which sequences come or go takes two uploads: tables and rows to the `BatchBuffers`, and the work items. While the
same sequences take one token each, nothing is planned at all: a kernel advances their positions, and tables get the blocks
that were added. Private tails are open at the end, so that the items stay valid however far they grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import torch

from radixkv.attention.options import AttentionOptions
from radixkv.attention.plan import AttentionPlan, Planner
from radixkv.attention.query_batch import QueryBatch
from radixkv.attention.sharing_rule import SharingRule
from radixkv.attention.triton.buffers import BatchBuffers, DeviceRows
from radixkv.attention.triton.cost_model import Tiling, decode_tiling, num_pieces, sharing_rule, tile_classes
from radixkv.attention.triton.heads import check_heads
from radixkv.attention.triton.launches import Launcher, LayerTensors, PartialResults, flat_launchers, shared_launchers
from radixkv.attention.triton.layer_launches import LayerLaunches, PoolLayer, pool_layers
from radixkv.attention.triton.work_items import DeviceItems, HeadShape, HostItems, lower, upload_items
from radixkv.cache import BlockCopy
from radixkv.memory import KVPool
from radixkv_kernels import BLOCK_SIZES, BlockCopier, advance_rows

# While a plan is kept, tails grow, and with them the longest piece. After so many steps a new plan is made.
_STEPS_PER_PLAN = 512

# A batch whose sequences have at most so many new tokens each is tiled like a decoding batch.
_MOST_DECODING_ROWS = 32


class TritonBackend:
    """Plans batches over one pool and attends them.

    Args:
        dtype: of queries.
        num_query_heads: of the first layer, for which the cost model weighs sharing.
        max_model_len: tokens of a sequence at most.
        sharing: when sharing pays; None: what the cost model says.
        multiprocessors: among which work is divided; None: those of the pool's device.
        max_draft_rows: rows of drafts that a decoding batch may have beside its sequences' own.

    Attributes:
        tiling: of decoding batches.
        buffers: the tables, and the rows of a decoding batch, padding included.

    Raises:
        ValueError: the kernels cannot take the pool's blocks, or the first layer's heads.
    """

    def __init__(
        self,
        pool: KVPool,
        dtype: torch.dtype,
        num_query_heads: int,
        max_num_seqs: int,
        max_model_len: int,
        *,
        sharing: SharingRule | None = None,
        multiprocessors: int | None = None,
        max_draft_rows: int = 0,
    ) -> None:
        if pool.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES} with Triton's kernels, got {pool.block_size}")
        layer = pool.layers[0]
        check_heads(num_query_heads, layer)
        if sharing is None:
            bytes_per_token = layer.elements_per_token * pool.dtype.itemsize
            sharing = sharing_rule(num_query_heads // layer.num_kv_heads, dtype, pool.dtype, bytes_per_token)
        self.pool = pool
        self.dtype = dtype
        device = pool.keys[0].device
        self.tiling = decode_tiling(device, pool.layers, multiprocessors)
        self._copier = BlockCopier([*pool.keys, *pool.values])
        max_blocks = -(-max_model_len // pool.block_size)
        self._planner = Planner(max_num_seqs, max_blocks, pool.block_size, sharing)
        self.buffers = BatchBuffers(max_num_seqs, max_blocks, device, max_draft_rows)
        self.pool_layers = pool_layers(pool)
        self._attention: TritonAttention | None = None
        self._steps_left = 0

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order, all layers in one launch."""
        self._copier.copy([(copy.source, copy.target, copy.num_tokens) for copy in copies])

    def prepare(self, batch: QueryBatch) -> TritonAttention:
        """Attention over one batch, for all layers; see `AttentionBackend.prepare`.

        If the sequences only take one more token each, this is the previous object, advanced.
        """
        if self._attention is not None and self._steps_left:
            new_blocks = self._planner.advance(batch)
            if new_blocks is not None:
                self.buffers.add(new_blocks)
                self._attention.advance()
                self._steps_left -= 1
                return self._attention
        plan = self._planner.plan(batch)
        rows = self.buffers.load(plan)
        self._attention = TritonAttention(
            plan, rows, self.buffers, self.pool_layers, self.dtype, self.tiling, batch.decodes
        )
        self._steps_left = _STEPS_PER_PLAN
        return self._attention


class TritonAttention(LayerLaunches):
    """Attention over one batch for all layers; an `AttentionBatch`. The next batch may overwrite its rows.

    Attributes:
        plan: as of the first batch that it was used for; ``rows`` have advanced since.
        buffers: the tables, and the rows of a decoding batch, padding included.
        tiling: how the batch is cut. A batch with a prompt of more than 32 new tokens takes several tile classes, one after
            the other: the prompt's wide tiles fill the GPU. Other batches, with drafts of any length, take one class.
    """

    def __init__(
        self,
        plan: AttentionPlan,
        rows: DeviceRows,
        buffers: BatchBuffers,
        layers: list[PoolLayer],
        dtype: torch.dtype,
        tiling: Tiling,
        decodes: bool,
    ) -> None:
        super().__init__(layers)
        self.plan = plan
        self.order = plan.order
        self.row_starts = plan.row_starts
        self.rows = rows
        self.buffers = buffers
        self.dtype = dtype
        narrow = decodes or int(np.diff(plan.row_starts).max(initial=0)) <= _MOST_DECODING_ROWS
        self.tiling = tiling if narrow else replace(tiling, one_class=False)
        self._partials = PartialResults(rows.positions.device)
        self._host_items: dict[HeadShape, HostItems] = {}
        self._items: dict[HeadShape, DeviceItems] = {}
        self._num_splits: dict[HeadShape, int] = {}

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[rows]`` on the device."""
        return self.rows.positions.long()

    def advance(self) -> None:
        """Move every row on by one token."""
        rows = self.rows
        advance_rows(rows.positions, rows.slots, self.buffers.tables, rows.row_tables, block_size=self.plan.block_size)

    def launchers(self, tensors: LayerTensors, options: AttentionOptions) -> list[Launcher]:
        shape, tables = HeadShape.of(tensors.query, tensors.key), self.buffers.tables
        if self.plan.is_flat:
            return flat_launchers(tensors, options, self.rows, tables, self.num_splits(shape), self._partials)
        return shared_launchers(tensors, options, self.rows, tables, self.items(shape), self._partials)

    def host_items(self, shape: HeadShape) -> HostItems:
        """The work items for layers of this shape, made when first asked for."""
        items = self._host_items.get(shape)
        if items is None:
            items = self._host_items[shape] = lower(self.plan.ranges, shape, self.dtype, self.tiling)
        return items

    def items(self, shape: HeadShape) -> DeviceItems:
        """The same on the device, uploaded when first asked for."""
        items = self._items.get(shape)
        if items is None:
            items = self._items[shape] = upload_items(self.host_items(shape), self.rows.positions.device)
        return items

    def num_splits(self, shape: HeadShape) -> int:
        """Into how many parts a flat batch splits each row's keys."""
        splits = self._num_splits.get(shape)
        if splits is None:
            # All rows are split into as many parts as the longest one, as if they were tiles over one range.
            lengths = self.plan.ranges.key_stop - self.plan.ranges.key_start
            longest, total, rows = lengths.max(keepdims=True), lengths.sum(keepdims=True), np.array([len(lengths)])
            tile_class = tile_classes(np.ones(1, dtype=np.int64), shape.group, self.dtype, self.tiling)
            (pieces,) = num_pieces(longest, rows, total, shape.num_kv_heads, tile_class, self.tiling)
            splits = self._num_splits[shape] = int(pieces)
        return splits
