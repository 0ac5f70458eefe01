"""What kernels read of every batch, in buffers that never move: block tables, and where a decoding batch's rows stand.

CUDA graphs repeat their launches with the same addresses, so that they read from here what each step left here.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.batch_tables import NewBlocks
from radixkv.memory.upload import aligned_starts, to_device, upload

Ints = NDArray[np.int64]

# As a position or, twice, as a slot: of a row that is not there.
_PADDING = -1


@dataclass(slots=True)
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


@dataclass(slots=True)
class HostRows:
    """The same on the host, all int64."""

    positions: Ints
    slots: Ints
    row_tables: Ints


def padded_size(num_rows: int) -> int:
    """To how many rows a decoding batch is padded, so that few sizes do: powers of two up to 8, then multiples of 8."""
    return 1 << (num_rows - 1).bit_length() if num_rows <= 8 else -(-num_rows // 8) * 8


class BatchBuffers:
    """Tables and rows in one buffer, so that one upload and one scatter bring whatever a step changes::

        tables ...                    | positions | slots (int64)     | row tables |

    Args:
        num_tables: sequences side by side at most.
        max_blocks: blocks of a sequence at most.
        device: where attention runs.

    Attributes:
        tables: int32 ``[num_tables, max_blocks]``: `BatchTables.host` on the device.
        rows: of the last batch that is small enough, and padding behind them: as many as any that decodes is padded to.
    """

    def __init__(self, num_tables: int, max_blocks: int, device: torch.device) -> None:
        room = max(8, padded_size(num_tables))
        start, total = aligned_starts((num_tables * max_blocks, 4 * room))[1:]
        self._buffer = torch.zeros(total, dtype=torch.int32, device=device)
        self.tables = self._buffer[: num_tables * max_blocks].view(num_tables, max_blocks)
        positions, slots, row_tables = self._buffer[start:].fill_(_PADDING).split((room, 2 * room, room))
        self.rows = DeviceRows(positions, slots.view(torch.int64), row_tables)
        self._row_places = np.arange(start, total)

    def add(self, new_blocks: NewBlocks) -> None:
        """Bring the tables up to date."""
        if len(new_blocks.places):
            self._scatter((new_blocks.places,), (new_blocks.blocks,))

    def load(self, new_blocks: NewBlocks, rows: HostRows) -> DeviceRows:
        """Bring the tables up to date, and the rows here; more than there is room for get memory of their own."""
        count, room = len(rows.positions), len(self.rows.positions)
        if count > room:
            self.add(new_blocks)
            parts = rows.positions.astype(np.int32), rows.slots.view(np.int32), rows.row_tables.astype(np.int32)
            positions, slots, row_tables = upload(parts, self._buffer.device)
            return DeviceRows(positions, slots.view(torch.int64), row_tables)
        values = np.full(4 * room, _PADDING, dtype=np.int32)
        values[:count] = rows.positions
        values[room : room + 2 * count] = rows.slots.view(np.int32)
        values[3 * room : 3 * room + count] = rows.row_tables
        self._scatter((new_blocks.places, self._row_places), (new_blocks.blocks, values))
        return self.rows.first(count)

    def _scatter(self, places: Iterable[Ints], values: Iterable[NDArray[np.int32]]) -> None:
        packed = np.concatenate((*(part.view(np.int32) for part in places), *values))
        there = to_device(torch.from_numpy(packed), self._buffer.device)
        # Of three int32, two are a place and one a value.
        places_there, values_there = there.split((len(packed) // 3 * 2, len(packed) // 3))
        self._buffer.scatter_(0, places_there.view(torch.int64), values_there)
