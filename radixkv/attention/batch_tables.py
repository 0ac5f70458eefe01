"""The block tables of the sequences that run side by side, in an order in which sharers are neighbours.

Both are kept from step to step: a sequence that joins is compared with a few others, one that leaves with none, and of a
table that grows only the new blocks are looked at.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_left
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.attention.plan import QueryChunk, common_blocks

_NO_TABLE = -1


class BatchColumns:
    """A batch's chunks, attribute by attribute: what is read of hundreds of objects is read once a step."""

    def __init__(self, chunks: Sequence[QueryChunk]) -> None:
        self.owners = [chunk.owner for chunk in chunks]
        self.versions = [chunk.version for chunk in chunks]
        self.context = np.array([chunk.num_context for chunk in chunks], dtype=np.int64)
        self.num_new = np.array([chunk.num_new for chunk in chunks], dtype=np.int64)
        self.num_blocks = np.array([len(chunk.block_ids) for chunk in chunks], dtype=np.int64)

    def has_members_of(self, other: BatchColumns) -> bool:
        """Whether these are the same sequences in the same order, with all the blocks that they had."""
        return self.owners == other.owners and self.versions == other.versions


@dataclass(slots=True)
class NewBlocks:
    """What a step adds to the tables.

    Attributes:
        places: where in `BatchTables.host`, flattened; none twice.
        blocks: the ids.
    """

    places: NDArray[np.int64]
    blocks: NDArray[np.int32]


_NOTHING_NEW = NewBlocks(np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int32))


class BatchTables:
    """Block tables by row.

    Args:
        num_tables: sequences side by side at most.
        max_blocks: blocks of a sequence at most.

    Attributes:
        host: int32 ``[num_tables, max_blocks]``.
        order: the sequences, so that those with a common prefix are neighbours.
        tables: which row of ``host`` each of them has.
        common: how many leading blocks ``order[i]`` and ``order[i + 1]`` have in common.
    """

    def __init__(self, num_tables: int, max_blocks: int) -> None:
        self.host: NDArray[np.int32] = np.zeros((num_tables, max_blocks), dtype=np.int32)
        self.order: list[Hashable] = []
        # An array, which numpy takes over at once.
        self.tables = array("q")
        self.common: list[int] = []
        self._table_of: dict[Hashable, int] = {}
        # Of each table: whose it is, as of which version, and how many blocks are in there.
        self._owners: list[Hashable] = [None] * num_tables
        self._taken = np.zeros(num_tables, dtype=np.bool_)
        self._versions = np.zeros(num_tables, dtype=np.int64)
        self._lengths = np.zeros(num_tables, dtype=np.int64)
        self._free = list(range(num_tables))[::-1]
        # The batch that was last taken in, and the table of each of its sequences.
        self._columns: BatchColumns | None = None
        self._own_tables = np.zeros(0, dtype=np.int64)

    def update(self, chunks: Sequence[QueryChunk], columns: BatchColumns) -> NewBlocks:
        """Let exactly the chunks' sequences be members, with their blocks as they are now; returns what is new in ``host``.

        Args:
            columns: the chunks' own.

        Raises:
            ValueError: sequences that are not all different, or more of them or longer tables than there is room for;
                nothing has changed then.
        """
        num_tables, max_blocks = self.host.shape
        longest = columns.num_blocks.max()
        if len(chunks) > num_tables or longest > max_blocks:
            raise ValueError(
                f"chunks: room for {num_tables} sequences of {max_blocks} blocks, got {len(chunks)} of up to {longest}"
            )
        joining: list[Hashable] = []
        if self._columns is None or not columns.has_members_of(self._columns):
            joining = self._change_members(columns)
        self._columns = columns
        new_blocks = self._write(chunks, columns)
        for owner in joining:
            self._insert(owner)
        return new_blocks

    def chunk_of(self, tables: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which chunk of the last batch each of these rows of ``host`` belongs to."""
        chunks = np.empty(len(self.host), dtype=np.int64)
        chunks[self._own_tables] = np.arange(len(self._own_tables))
        return chunks[tables]

    def _change_members(self, columns: BatchColumns) -> list[Hashable]:
        """Give tables to those who join, and take them from those who leave; returns who must still get a place."""
        owners = columns.owners
        if len(set(owners)) < len(owners):
            raise ValueError("chunks: expected an owner for each, all different")
        found = map(self._table_of.get, owners, itertools.repeat(_NO_TABLE))
        tables = np.fromiter(found, np.int64, len(owners))
        versions = np.array(columns.versions, dtype=np.int64)
        stays = (tables != _NO_TABLE) & (self._versions[tables] == versions)
        leaves = self._taken.copy()
        leaves[tables[stays]] = False
        for table in leaves.nonzero()[0].tolist():
            self._remove(self._owners[table])
        joining = (~stays).nonzero()[0].tolist()
        for i in joining:
            tables[i] = self._take_table(owners[i])
        self._versions[tables] = versions
        self._own_tables = tables
        return [owners[i] for i in joining]

    def _take_table(self, owner: Hashable) -> int:
        table = self._table_of[owner] = self._free.pop()
        self._owners[table] = owner
        self._taken[table] = True
        self._lengths[table] = 0
        return table

    def _write(self, chunks: Sequence[QueryChunk], columns: BatchColumns) -> NewBlocks:
        """Add the blocks that are not in the tables yet."""
        tables = self._own_tables
        known = self._lengths[tables]
        (grown,) = (known < columns.num_blocks).nonzero()
        if not len(grown):
            return _NOTHING_NEW
        starts = known[grown]
        counts = columns.num_blocks[grown] - starts
        blocks = np.concatenate(
            [chunks[i].block_ids[start:] for i, start in zip(grown.tolist(), starts.tolist(), strict=True)]
        )
        first = tables[grown] * self.host.shape[1] + starts
        places = (first - counts.cumsum() + counts).repeat(counts) + np.arange(len(blocks))
        self.host.reshape(-1)[places] = blocks
        self._lengths[tables] = columns.num_blocks
        return NewBlocks(places, blocks)

    def _insert(self, owner: Hashable) -> None:
        # Sorted by block ids, compared as memory. Every table ends with a block that is its sequence's own, so none begins
        # another: they differ somewhere within both, and stay in order however they grow. What lies behind is not reached.
        table = self._table_of[owner]
        place = bisect_left(self.tables, self._bytes(table), key=self._bytes)
        self.order.insert(place, owner)
        self.tables.insert(place, table)
        start = max(place - 1, 0)
        rows = [self._row(neighbour) for neighbour in self.tables[start : place + 2]]
        self.common[start:place] = [common_blocks(a, b) for a, b in itertools.pairwise(rows)]

    def _remove(self, owner: Hashable) -> None:
        place = self.order.index(owner)
        del self.order[place], self.tables[place]
        if 0 < place < len(self.order):
            # What the neighbours on both sides share is what both shared with the one between them.
            self.common[place - 1 : place + 1] = [min(self.common[place - 1 : place + 1])]
        elif self.common:
            del self.common[0 if place == 0 else -1]
        table = self._table_of.pop(owner)
        self._owners[table] = None
        self._taken[table] = False
        self._free.append(table)

    def _bytes(self, table: int) -> bytes:
        content: bytes = self.host[table].tobytes()
        return content

    def _row(self, table: int) -> NDArray[np.int32]:
        return self.host[table, : self._lengths[table]]
