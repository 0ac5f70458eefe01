"""What kernels read of every batch, in buffers that never move: block tables, and the rows of a decoding batch.

CUDA graphs repeat their launches with the same addresses; each step writes its own numbers there.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.batch_tables import NewBlocks
from radixkv.attention.plan import AttentionPlan
from radixkv.attention.query_batch import Ints
from radixkv.memory.upload import aligned_starts, to_device, upload

# A padding row's position, and each half of its slot.
_PADDING = -1


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """A batch's rows on the device.

    Attributes:
        positions: int32 ``[rows]``; -1: padding.
        slots: int64 ``[rows]``: where each row's key and value go; -1: padding.
        row_tables: int32 ``[rows]``: which table each row reads through.
    """

    positions: torch.Tensor
    slots: torch.Tensor
    row_tables: torch.Tensor

    def first(self, count: int) -> DeviceRows:
        """The first ``count`` of them, in the same memory."""
        return DeviceRows(self.positions[:count], self.slots[:count], self.row_tables[:count])


def padded_size(num_rows: int) -> int:
    """The number of rows to which a decoding batch is padded, so that few sizes do: powers of two up to 8, then four sizes
    to each power of two, and from 128 on multiples of 32.

    A row of padding costs little: attention returns at once, and below some 200 rows a matrix product waits for its weights.
    """
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    step = min(32, 1 << ((num_rows - 1).bit_length() - 3))
    return -(-num_rows // step) * step


def padded_sizes(max_rows: int) -> list[int]:
    """All sizes to which batches of up to ``max_rows`` are padded, in ascending order."""
    return sorted({padded_size(num_rows) for num_rows in range(1, max_rows + 1)})


def drafting_sizes(max_num_seqs: int, max_draft_rows: int) -> list[int]:
    """Further sizes for batches whose sequences have drafts: a few, each about a quarter larger than the one before."""
    most = padded_size(max_num_seqs + max_draft_rows)
    sizes = [padded_size(max_num_seqs)]
    while sizes[-1] < most:
        sizes.append(min(most, -(-5 * sizes[-1] // 64) * 16))
    return sizes[1:]


class BatchBuffers:
    """Tables and rows in one buffer, so that one upload and one scatter apply all that a step changes::

        tables ...                    | positions | slots (int64)     | row tables |

    Args:
        max_draft_rows: rows of drafts that a decoding batch may have beside its sequences' own.

    Attributes:
        tables: int32 ``[max_num_seqs, max_blocks]``: `AttentionPlan.block_ids` on the device.
        rows: of the last batch that fits, and padding behind them: at least as many as any decoding batch is padded to.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, device: torch.device, max_draft_rows: int) -> None:
        # A multiple of 16 bytes, so that slots and row tables are aligned to 16 bytes, too.
        (capacity,) = aligned_starts((max(8, padded_size(max_num_seqs + max_draft_rows)),))[1:]
        start, total = aligned_starts((max_num_seqs * max_blocks, 4 * capacity))[1:]
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self.tables = self._buffer[: max_num_seqs * max_blocks].view(max_num_seqs, max_blocks)
        positions, slots, row_tables = self._buffer[start:].fill_(_PADDING).split((capacity, 2 * capacity, capacity))
        self.rows = DeviceRows(positions, slots.view(torch.int64), row_tables)
        self._row_indices = np.arange(start, total)

    def add(self, new_blocks: NewBlocks) -> None:
        """Bring the tables up to date."""
        if len(new_blocks.indices):
            self._scatter((new_blocks.indices,), (new_blocks.block_ids,))

    def load(self, plan: AttentionPlan) -> DeviceRows:
        """Update the tables, and load the plan's rows; if there are more than fit, they get memory of their own."""
        count, capacity = plan.num_rows, len(self.rows.positions)
        if count > capacity:
            self.add(plan.new_blocks)
            parts = plan.positions.astype(np.int32), plan.slots.view(np.int32), plan.row_tables.astype(np.int32)
            positions, slots, row_tables = upload(parts, self._buffer.device)
            return DeviceRows(positions, slots.view(torch.int64), row_tables)
        values = np.full(4 * capacity, _PADDING, dtype=np.int32)
        values[:count] = plan.positions
        values[capacity : capacity + 2 * count] = plan.slots.view(np.int32)
        values[3 * capacity : 3 * capacity + count] = plan.row_tables
        self._scatter((plan.new_blocks.indices, self._row_indices), (plan.new_blocks.block_ids, values))
        return self.rows.first(count)

    def _scatter(self, indices: Iterable[Ints], values: Iterable[NDArray[np.int32]]) -> None:
        packed = np.concatenate((*(part.view(np.int32) for part in indices), *values))
        device_packed = to_device(torch.from_numpy(packed), self._buffer.device)
        # Each entry is three int32: two are its int64 index, one its value.
        device_indices, device_values = device_packed.split((len(packed) // 3 * 2, len(packed) // 3))
        self._buffer.scatter_(0, device_indices.view(torch.int64), device_values)
