"""The block tables of the sequences that run side by side, in an order in which those with a common prefix are neighbours.

Tables and order are kept from step to step: a joining sequence is compared with a few others, a leaving one with none, and
only the new blocks of a growing table are read.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.query_batch import Ints, ReadableTable, concatenated_ranges

_NOT_A_MEMBER = -1


@dataclass(frozen=True, slots=True)
class NewBlocks:
    """What a step adds to `BatchTables.block_ids`.

    Attributes:
        indices: into the flattened array, without duplicates.
        block_ids: the new values at these indices.
    """

    indices: Ints
    block_ids: NDArray[np.int32]


_NO_NEW_BLOCKS = NewBlocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class BatchTables:
    """Block tables as rows of one array.

    Attributes:
        block_ids: int32 ``[max_num_seqs, max_blocks]``.
        order: the members, those with a common prefix next to each other.
        indices: which row of ``block_ids`` each of them has.
        common: how many leading blocks ``order[i]`` and ``order[i + 1]`` have in common.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int) -> None:
        self.block_ids: NDArray[np.int32] = np.zeros((max_num_seqs, max_blocks), dtype=np.int32)
        self.order: list[ReadableTable] = []
        # An array rather than a list, because numpy copies it at once.
        self.indices = array("q")
        self.common: list[int] = []
        self._index_of: dict[ReadableTable, int] = {}
        # By row of ``block_ids``: the version of the member's table, and how many of its blocks are there.
        self._versions = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_blocks = np.zeros(max_num_seqs, dtype=np.int64)
        # ``block_ids`` as far as any table has reached: rows for a model's whole length take long to compare.
        self._compared = self.block_ids[:, :0]
        self._free = list(range(max_num_seqs))[::-1]
        # The last batch in its own order: tables, their versions, and their rows of ``block_ids``.
        self._batch: list[ReadableTable] = []
        self._batch_versions: list[int] = []
        self._batch_indices: Ints = np.zeros(0, dtype=np.int64)

    def is_unchanged(self, tables: Sequence[ReadableTable]) -> bool:
        """Whether these are the last batch's tables in the same order, with all the blocks that they had."""
        return list(tables) == self._batch and [table.version for table in tables] == self._batch_versions

    def update(self, tables: Sequence[ReadableTable], num_blocks: Ints) -> NewBlocks:
        """Make exactly these tables, all different, the members, as they are now.

        Args:
            num_blocks: how many leading blocks of each are read; the last one belongs to that sequence alone.

        Raises:
            ValueError: more tables or blocks than there is capacity for, or a table has fewer blocks than are read; nothing
                has changed then.
        """
        if self.is_unchanged(tables):
            return self.extend(num_blocks)
        self._check_capacity(len(tables), num_blocks)
        indices = np.fromiter(
            map(self._index_of.get, tables, itertools.repeat(_NOT_A_MEMBER)), np.int64, count=len(tables)
        )
        versions = [table.version for table in tables]
        stays = (indices != _NOT_A_MEMBER) & (self._versions[indices] == versions)
        known = np.where(stays, self._num_blocks[indices], 0)
        grown, blocks = self._read(tables, known, num_blocks)
        joining = self._change_members(tables, indices, stays)
        self._versions[indices] = versions
        self._batch, self._batch_versions, self._batch_indices = list(tables), versions, indices
        new_blocks = self._write(indices[grown], known[grown], num_blocks[grown], blocks)
        for table in joining:
            self._insert(table)
        return new_blocks

    def extend(self, num_blocks: Ints) -> NewBlocks:
        """Append the blocks by which the last batch's tables have grown; refuses what `update` does."""
        self._check_capacity(len(self._batch), num_blocks)
        indices = self._batch_indices
        known = self._num_blocks[indices]
        grown, blocks = self._read(self._batch, known, num_blocks)
        return self._write(indices[grown], known[grown], num_blocks[grown], blocks)

    def batch_order(self) -> Ints:
        """``[sequences]``: for each table in ``order``, its index in the last batch."""
        batch_index = np.empty(len(self.block_ids), dtype=np.int64)
        batch_index[self._batch_indices] = np.arange(len(self._batch_indices))
        return batch_index[self.indices]

    def _check_capacity(self, num_tables: int, num_blocks: Ints) -> None:
        max_num_seqs, max_blocks = self.block_ids.shape
        longest = int(num_blocks.max())
        if num_tables > max_num_seqs or longest > max_blocks:
            raise ValueError(
                f"tables: expected at most {max_num_seqs} sequences of {max_blocks} blocks, "
                f"got {num_tables} of up to {longest}"
            )

    @staticmethod
    def _read(
        tables: Sequence[ReadableTable], known: Ints, num_blocks: Ints
    ) -> tuple[NDArray[np.intp], list[NDArray[np.int32]]]:
        """Which tables have more blocks than the known ones, and those blocks."""
        (grown,) = (known < num_blocks).nonzero()
        blocks = []
        for index, start, stop in zip(grown.tolist(), known[grown].tolist(), num_blocks[grown].tolist(), strict=True):
            ids = tables[index].block_ids
            if len(ids) < stop:
                raise ValueError(f"tables: expected {stop} blocks to hold sequence {index}'s tokens, got {len(ids)}")
            blocks.append(ids[start:stop])
        return grown, blocks

    def _write(self, indices: Ints, start: Ints, stop: Ints, blocks: list[NDArray[np.int32]]) -> NewBlocks:
        if not blocks:
            return _NO_NEW_BLOCKS
        block_ids = np.concatenate(blocks)
        flat = concatenated_ranges(indices * self.block_ids.shape[1] + start, stop - start)
        self.block_ids.reshape(-1)[flat] = block_ids
        self._num_blocks[indices] = stop
        longest = int(stop.max())
        if longest > self._compared.shape[1]:
            self._compared = self.block_ids[:, :longest]
        return NewBlocks(flat, block_ids)

    def _change_members(
        self, tables: Sequence[ReadableTable], indices: Ints, stays: NDArray[np.bool_]
    ) -> list[ReadableTable]:
        """Remove leaving members, and give joining tables a row, noted in ``indices``; they have no position yet."""
        staying = np.zeros(len(self.block_ids), dtype=np.bool_)
        staying[indices[stays]] = True
        # From the end, so that the positions still to be removed stay valid.
        for position in (~staying[np.array(self.indices)]).nonzero()[0][::-1].tolist():
            self._remove(position)
        joining = (~stays).nonzero()[0].tolist()
        for i in joining:
            indices[i] = self._index_of[tables[i]] = self._free.pop()
        return [tables[i] for i in joining]

    def _insert(self, table: ReadableTable) -> None:
        # Sorted by block ids, compared as raw bytes. Every table ends with a block that is its sequence's own, so no table is
        # a prefix of another: two tables differ within the length of both, and stay in order however they grow.
        index = self._index_of[table]
        position = bisect_left(self.indices, self._bytes(index), key=self._bytes)
        self.order.insert(position, table)
        self.indices.insert(position, index)
        start = max(position - 1, 0)
        neighbours = [self._blocks(neighbour) for neighbour in self.indices[start : position + 2]]
        self.common[start:position] = [common_blocks(a, b) for a, b in itertools.pairwise(neighbours)]

    def _remove(self, position: int) -> None:
        table, index = self.order.pop(position), self.indices.pop(position)
        if 0 < position < len(self.order):
            # The new neighbours have in common the blocks that both had in common with the removed table.
            self.common[position - 1 : position + 1] = [min(self.common[position - 1 : position + 1])]
        elif self.common:
            del self.common[0 if position == 0 else -1]
        del self._index_of[table]
        self._free.append(index)

    def _bytes(self, index: int) -> bytes:
        content: bytes = self._compared[index].tobytes()
        return content

    def _blocks(self, index: int) -> NDArray[np.int32]:
        return self.block_ids[index, : self._num_blocks[index]]


def common_blocks(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading blocks two tables have in common."""
    shorter = min(len(a), len(b))
    if not shorter:
        return 0
    differs = a[:shorter] != b[:shorter]
    first = int(differs.argmax())
    return first if differs[first] else shorter
