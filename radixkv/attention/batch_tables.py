"""The block tables of the sequences that run side by side, kept on the device and in an order in which sharers are
neighbours.

Both are kept from step to step: a sequence that joins is compared with a few others, one that leaves with none, and a table
that grows uploads its new blocks alone.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.plan import QueryChunk, common_blocks


@dataclass(slots=True)
class _Member:
    """One sequence: which table it has, and how many of its blocks are in there."""

    table: int
    version: int
    num_blocks: int = 0


class BatchTables:
    """Block tables by row, on host and device.

    Args:
        num_tables: sequences side by side at most.
        max_blocks: blocks of a sequence at most.
        device: where attention runs.

    Attributes:
        host: int32 ``[num_tables, max_blocks]``.
        device: the same on the device.
        order: the sequences, so that those with a common prefix are neighbours.
        tables: which row of ``host`` each of them has.
        common: how many leading blocks ``order[i]`` and ``order[i + 1]`` have in common.
    """

    def __init__(self, num_tables: int, max_blocks: int, device: torch.device) -> None:
        self.host: NDArray[np.int32] = np.zeros((num_tables, max_blocks), dtype=np.int32)
        self.device = torch.zeros(num_tables, max_blocks, dtype=torch.int32, device=device)
        self.order: list[Hashable] = []
        self.tables: list[int] = []
        self.common: list[int] = []
        self._members: dict[Hashable, _Member] = {}
        self._free = list(range(num_tables))[::-1]

    def update(self, chunks: Sequence[QueryChunk]) -> None:
        """Let exactly the chunks' sequences be members, with their blocks as they are now.

        Raises:
            ValueError: more sequences or longer tables than there is room for; nothing has changed then.
        """
        num_tables, max_blocks = self.host.shape
        lengths = [len(chunk.block_ids) for chunk in chunks]
        if len(chunks) > num_tables or max(lengths) > max_blocks:
            raise ValueError(
                f"chunks: room for {num_tables} sequences of {max_blocks} blocks, got {len(chunks)} of up to {max(lengths)}"
            )
        members = self._members
        staying = {
            chunk.owner for chunk in chunks if chunk.owner in members and members[chunk.owner].version == chunk.version
        }
        for owner in members.keys() - staying:
            self._remove(owner)
        written: list[NDArray[np.int64]] = []
        joining: list[Hashable] = []
        for chunk, length in zip(chunks, lengths, strict=True):
            member = members.get(chunk.owner)
            if member is None:
                member = members[chunk.owner] = _Member(self._free.pop(), chunk.version)
                joining.append(chunk.owner)
            if member.num_blocks < length:
                self.host[member.table, member.num_blocks : length] = chunk.block_ids[member.num_blocks :]
                written.append(member.table * max_blocks + np.arange(member.num_blocks, length))
                member.num_blocks = length
        for owner in joining:
            self._insert(owner)
        if written:
            places = np.concatenate(written)
            device = self.device.device
            blocks = torch.from_numpy(self.host.reshape(-1)[places]).to(device, non_blocking=True)
            self.device.view(-1)[torch.from_numpy(places).to(device, non_blocking=True)] = blocks

    def _insert(self, owner: Hashable) -> None:
        # Sorted by block ids. Every table ends with a block that is its sequence's own, so none begins another: they
        # differ somewhere within both, and stay in order however they grow.
        own = self._row(owner)
        low, high = 0, len(self.order)
        while low < high:
            middle = (low + high) // 2
            other = self._row(self.order[middle])
            shared = common_blocks(own, other)
            if shared < min(len(own), len(other)) and other[shared] < own[shared]:
                low = middle + 1
            else:
                high = middle
        self.order.insert(low, owner)
        self.tables.insert(low, self._members[owner].table)
        neighbours = [
            common_blocks(self._row(a), self._row(b))
            for a, b in itertools.pairwise(self.order[max(low - 1, 0) : low + 2])
        ]
        self.common[max(low - 1, 0) : low] = neighbours

    def _remove(self, owner: Hashable) -> None:
        place = self.order.index(owner)
        del self.order[place], self.tables[place]
        if 0 < place < len(self.order):
            # What the neighbours on both sides share is what both shared with the one between them.
            self.common[place - 1 : place + 1] = [min(self.common[place - 1 : place + 1])]
        elif self.common:
            del self.common[0 if place == 0 else -1]
        self._free.append(self._members.pop(owner).table)

    def _row(self, owner: Hashable) -> NDArray[np.int32]:
        member = self._members[owner]
        return self.host[member.table, : member.num_blocks]
