"""Which sequences of a batch have a prefix in common that is read once for all of them.

Among tables in order (`BatchTables`), those that share a prefix are neighbours. So how many blocks each has in common with
the next one says as much as a tree of the prefixes: a group of sequences is a range of neighbours, and its prefix as long as
the smallest number within that range::

    blocks of A   7 8 9 | 20            7 8 9 by A, B and C
    blocks of B   7 8 9 | 31 32         31 by B and C
    blocks of C   7 8 9 | 31 40
    blocks of D   50 51
    in common         3   4   0
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """The groups for which reading their prefix once pays.

    Attributes:
        ranges: int64 ``[4, groups]``: first sequence, one past the last, first key, one past the last; parents before what
            lies below them.
        private_from: int64 ``[sequences]``: the first key that no group covers.
        saved_tokens: keys that need not be read again, per layer.
    """

    ranges: Ints
    private_from: Ints
    saved_tokens: int


def prefix_groups(common: Sequence[int], block_size: int, min_tokens: Sequence[int]) -> PrefixGroups:
    """The groups whose prefix is long enough; the keys of the others are left to the groups below them.

    Args:
        common: how many leading blocks neighbours have in common.
        block_size: tokens per block.
        min_tokens: how long a prefix must be, below that of the group above, by the number of sequences.
    """
    groups: list[int] = []
    private_from = [0] * (len(common) + 1)
    saved_tokens = 0
    for start, stop, common_blocks in reversed(_common_intervals(common)):
        # Every ancestor of this group was handled before it.
        depth, end = private_from[start], common_blocks * block_size
        num_sequences = stop - start
        if end - depth >= min_tokens[num_sequences]:
            groups += (start, stop, depth, end)
            private_from[start:stop] = [end] * num_sequences
            saved_tokens += (num_sequences - 1) * (end - depth)
    ranges = np.array(groups, dtype=np.int64).reshape(-1, 4).T
    return PrefixGroups(ranges, np.array(private_from, dtype=np.int64), saved_tokens)


def _common_intervals(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """All largest groups of neighbours ``(first, one past the last, leading blocks in common)``, children before parents.

    In one pass with a stack of the groups that are still open (Abouelhoda, Kurtz and Ohlebusch 2004: the intervals of an
    array of longest common prefixes).
    """
    found: list[tuple[int, int, int]] = []
    below: list[tuple[int, int]] = []
    start, depth = 0, 0
    for index, blocks in enumerate(itertools.chain(common, (0,))):
        if blocks > depth:
            below.append((start, depth))
            start, depth = index, blocks
        while blocks < depth:
            found.append((start, index + 1, depth))
            if below[-1][1] < blocks:
                depth = blocks  # begins where the one that ends here does
            else:
                start, depth = below.pop()
    return found
