"""A list that counts how many of its items are read."""

from __future__ import annotations

from typing import Any


class CountedReads(list[int]):
    """Counts the items that are read, alone or in slices.

    Attributes:
        num_read: how many so far.
    """

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found
