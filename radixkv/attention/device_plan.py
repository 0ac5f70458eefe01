"""The plan of a batch as int32 buffers on a GPU, lowered once for all layers and kept while the batch only grows.

::

    chunks ── BatchTables: who shares what with whom ── runs of keys ── tiles x pieces ── work items
                 kept from step to step                  (nodes, rests)

A step in which sequences come or go takes two uploads: tables and rows to the `BatchBuffers`, and the items. While the same
sequences take one token each, nothing is planned at all: their positions move on by a kernel, and tables get the blocks that
were added. Private rests are open at the end, so that items stay true however far they grow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from radixkv.attention.batch_buffers import BatchBuffers, DeviceRows, HostRows
from radixkv.attention.batch_tables import BatchColumns, BatchTables, NewBlocks
from radixkv.attention.gpu_cost_model import fewest_shared_tokens, flat_is_better, num_pieces, tile_classes
from radixkv.attention.lowering import DeviceItems, HeadShape, HostItems, Runs, lower
from radixkv.attention.plan import QueryChunk, check_chunks
from radixkv.attention.shared_nodes import shared_nodes
from radixkv_kernels import advance_rows

# Rests grow while the plan is kept, and with them the longest piece. After so many tokens it is made anew.
_STEPS_A_PLAN = 512


@dataclass(slots=True)
class DevicePlan:
    """One batch's work. It holds until its planner is asked for the next plan, whose rows may take the same memory.

    Attributes:
        order: chunk indices in the order in which their rows stand in the packed batch.
        row_starts: ``[chunks + 1]``: the rows of the chunk ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        rows: on the device.
        buffers: the tables, and the rows of a batch that decodes, padding included.
        num_splits: not None: the batch decodes and shares too little to matter; each row's keys in so many parts.
        saved_tokens: keys that sharing saves reading, a layer.
    """

    order: list[int]
    row_starts: list[int]
    rows: DeviceRows
    buffers: BatchBuffers
    num_splits: dict[HeadShape, int] | None
    saved_tokens: int
    runs: Runs
    dtype: torch.dtype
    multiprocessors: int
    _host_items: dict[HeadShape, HostItems] = field(default_factory=dict)
    _items: dict[HeadShape, DeviceItems] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return self.row_starts[-1]

    @property
    def is_flat(self) -> bool:
        """Whether every row reads all its keys alone."""
        return self.num_splits is not None

    def host_items(self, shape: HeadShape) -> HostItems:
        """The work items for layers of this shape, lowered when first asked for."""
        items = self._host_items.get(shape)
        if items is None:
            items = self._host_items[shape] = lower(self.runs, shape, self.dtype, self.multiprocessors)
        return items

    def items(self, shape: HeadShape) -> DeviceItems:
        """The same on the device, uploaded when first asked for."""
        items = self._items.get(shape)
        if items is None:
            items = self._items[shape] = self.host_items(shape).upload(self.rows.positions.device)
        return items

    def splits(self, shape: HeadShape) -> int | None:
        """Parts of each row's keys, where the flat path is taken; None: take the items."""
        if self.num_splits is None:
            return None
        splits = self.num_splits.get(shape)
        if splits is None:
            lengths = self.runs.key_stop - self.runs.key_start
            ones = np.ones_like(lengths)
            tile_class = tile_classes(ones, shape.group, self.dtype)
            pieces = num_pieces(lengths, ones, shape.num_kv_heads, tile_class, self.multiprocessors)
            splits = self.num_splits[shape] = int(pieces.max())
        return splits


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
        self._tables = BatchTables(max_sequences, max_blocks)
        self._buffers = BatchBuffers(max_sequences, max_blocks, device)
        self._block_size = block_size
        self._bytes_per_token = bytes_per_token
        # By the number of sequences: it is asked for every node of every tree.
        alone = 0, 0
        shared = (fewest_shared_tokens(count, shape.group, element_bytes) for count in range(2, max_sequences + 1))
        self._fewest_tokens = [*alone, *shared]
        self._dtype = dtype
        self._multiprocessors = multiprocessors
        self._plan: DevicePlan | None = None
        self._steps_left = 0
        # Of the last batch: the next one must continue it for the plan to be kept.
        self._columns: BatchColumns | None = None
        # Nodes stay as they are while neighbours have as much in common as before.
        self._common: list[int] = []
        self._nodes = shared_nodes(self._common, block_size, self._fewest_tokens)

    def plan(self, chunks: Sequence[QueryChunk]) -> DevicePlan:
        """The batch's plan; the same object as before, moved on, where the sequences only take one token more each.

        Raises:
            ValueError: there is no chunk, a chunk has no new token, its table does not reach to its last token, or there
                are more sequences or blocks than there is room for.
        """
        columns = BatchColumns(chunks)
        if self._plan is not None and self._is_next_step(columns):
            self._buffers.add(self._tables.update(chunks, columns))
            rows = self._plan.rows
            advance_rows(rows.positions, rows.slots, self._buffers.tables, rows.row_tables, block_size=self._block_size)
            self._columns = columns
            self._steps_left -= 1
            return self._plan
        room = columns.num_blocks * self._block_size - columns.context - columns.num_new
        if not chunks or not ((room >= 0) & (columns.num_new > 0) & (columns.context >= 0)).all():
            check_chunks(chunks, self._block_size)
        self._plan = None
        self._plan = self._make(columns, self._tables.update(chunks, columns))
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

    def _make(self, columns: BatchColumns, new_blocks: NewBlocks) -> DevicePlan:
        size = self._block_size
        table = np.array(self._tables.tables, dtype=np.int64)
        order = self._tables.chunk_of(table)
        context = columns.context[order]
        num_new = columns.num_new[order]
        sequences = np.arange(len(order))
        row_starts = np.zeros(len(order) + 1, dtype=np.int64)
        num_new.cumsum(out=row_starts[1:])
        of_row = sequences.repeat(num_new)
        positions = np.arange(len(of_row)) + (context - row_starts[:-1])[of_row]
        row_tables = table[of_row]
        blocks, offsets = divmod(positions, size)
        slots = self._tables.host[row_tables, blocks].astype(np.int64) * size + offsets

        if self._tables.common != self._common:
            self._common = self._tables.common.copy()
            self._nodes = shared_nodes(self._common, size, self._fewest_tokens)
        nodes, private_from, saved = self._nodes.ranges, self._nodes.private_from, self._nodes.saved_tokens
        decodes = len(of_row) == len(order)
        flat = decodes and flat_is_better(saved, self._bytes_per_token)
        if flat:
            nodes, private_from, saved = nodes[:, :0], np.zeros_like(context), 0
        rests = np.array((sequences, sequences + 1, private_from, context + num_new))
        first, last, key_start, key_stop = np.concatenate((nodes, rests), axis=1)
        runs = Runs(row_starts[first], row_starts[last], table[first], key_start, key_stop, num_nodes=nodes.shape[1])
        return DevicePlan(
            order=order.tolist(),
            row_starts=row_starts.tolist(),
            rows=self._buffers.load(new_blocks, HostRows(positions, slots, row_tables)),
            buffers=self._buffers,
            num_splits={} if flat else None,
            saved_tokens=saved,
            runs=runs,
            dtype=self._dtype,
            multiprocessors=self._multiprocessors,
        )
