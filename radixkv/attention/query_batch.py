"""The input of attention: the new tokens of a batch's sequences, column by column."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


class ReadableTable(Protocol):
    """The part of a sequence's block table that attention reads. Tables are compared and hashed by identity.

    Attributes:
        block_ids: int32, the physical block of each ``block_size`` positions, at least up to the last new token. The blocks
            of new tokens belong to this sequence alone.
        version: changes when a block that the table already had is replaced by another, not when blocks are appended.
    """

    @property
    def block_ids(self) -> NDArray[np.int32]: ...

    @property
    def version(self) -> int: ...


@dataclass(slots=True)
class QueryBatch:
    """The new tokens of a batch's sequences.

    Attributes:
        tables: each sequence's block table, all different.
        num_context: int64 ``[sequences]``: tokens whose keys and values are already in the blocks.
        num_new: int64 ``[sequences]``: tokens to compute now, at positions ``num_context ..``; at least 1.
        num_decoding: int64 ``[sequences]``: how many of a sequence's last new tokens a token of the answer follows: the last
            known token and the drafts after it; 0 if the last known token is not in this batch. None: one per sequence.
    """

    tables: Sequence[ReadableTable]
    num_context: Ints
    num_new: Ints
    num_decoding: Ints | None = None

    @property
    def decodes(self) -> bool:
        """Whether a token of the answer follows every new token, so that of a prompt there is at most its last token."""
        return bool((self.num_new == (1 if self.num_decoding is None else self.num_decoding)).all())

    def num_blocks(self, block_size: int) -> Ints:
        """``[sequences]``: how many blocks hold a sequence's tokens, the new ones included."""
        return -(-(self.num_context + self.num_new) // block_size)

    def check(self) -> None:
        """Refuse a batch that no plan can be made for.

        Raises:
            ValueError: there is no sequence, the columns differ in length, a table occurs twice, or a sequence has no new
                token or a negative context.
        """
        count = len(self.tables)
        if not count:
            raise ValueError("tables: expected at least one sequence, got none")
        for name, column in (("num_context", self.num_context), ("num_new", self.num_new)):
            if column.shape != (count,):
                raise ValueError(f"{name}: expected shape [{count}], one number per table, got {list(column.shape)}")
        if len(set(self.tables)) < count:
            raise ValueError(f"tables: expected {count} different ones, got {len(set(self.tables))}")
        for name, column, least in (("num_context", self.num_context, 0), ("num_new", self.num_new, 1)):
            if (column < least).any():
                index = int((column < least).argmax())
                raise ValueError(f"{name}: expected at least {least}, got {int(column[index])} for sequence {index}")


def concatenated_ranges(starts: Ints, counts: Ints) -> Ints:
    """``starts[i], starts[i] + 1, ...``, ``counts[i]`` numbers each, one range after the other."""
    numbers: Ints = (starts - counts.cumsum() + counts).repeat(counts)
    numbers += np.arange(len(numbers))
    return numbers
