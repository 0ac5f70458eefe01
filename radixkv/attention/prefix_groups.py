"""Finds the sequences of a batch whose common prefix is worth reading once for all of them.

Among tables in order (`BatchTables`), those that share a prefix are neighbours. So the number of blocks that
each has in common with the next describes the whole tree of prefixes: a group of sequences is a range of neighbours, and its
prefix is as long as the smallest such number within the range::

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

from radixkv.attention.query_batch import Ints
from radixkv.attention.sharing_rule import SharingRule


@dataclass(frozen=True, slots=True)
class PrefixGroups:
    """The groups whose prefix is worth reading once.

    Attributes:
        ranges: int64 ``[4, groups]``: first sequence, one past the last, first key, one past the last; parents before their
            descendants.
        private_from: int64 ``[sequences]``: the first key that no group covers.
        saved_tokens: keys that need not be read again, per layer.
    """

    ranges: Ints
    private_from: Ints
    saved_tokens: int


def prefix_groups(common: Sequence[int], num_new: Sequence[int], block_size: int, rule: SharingRule) -> PrefixGroups:
    """The groups for which sharing pays; the keys of the others are left to the groups below them.

    Args:
        common: how many leading blocks neighbours have in common.
        num_new: each sequence's number of rows.
    """
    groups: list[int] = []
    private_from, levels = [0] * (len(common) + 1), [0] * (len(common) + 1)
    saved_tokens = 0
    rows_before = [0, *itertools.accumulate(num_new)]
    decodes = rows_before[-1] == len(num_new)
    readings_before = rows_before if decodes else [0, *itertools.accumulate(map(rule.readings, num_new))]
    for start, stop, common_blocks in reversed(_common_intervals(common)):
        # Every ancestor of this group was handled before it.
        depth, end = private_from[start], common_blocks * block_size
        num_rows = rows_before[stop] - rows_before[start]
        alone = readings_before[stop] - readings_before[start]
        saved = (alone - rule.readings(num_rows)) * (end - depth)
        if levels[start] != rule.max_levels and rule.pays(saved, num_rows):
            groups += (start, stop, depth, end)
            private_from[start:stop] = [end] * (stop - start)
            levels[start:stop] = [levels[start] + 1] * (stop - start)
            saved_tokens += saved
    ranges = np.array(groups, dtype=np.int64).reshape(-1, 4).T
    return PrefixGroups(ranges, np.array(private_from, dtype=np.int64), saved_tokens)


def _common_intervals(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """All maximal groups of neighbours ``(first, one past the last, leading blocks in common)``, children before parents.

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
                depth = blocks  # the shallower group begins where the one that ends here began
            else:
                start, depth = below.pop()
    return found
