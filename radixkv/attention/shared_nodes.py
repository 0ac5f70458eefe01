"""Which shared prefixes of a batch are worth work items of their own on a GPU.

Among sequences in the order of their block tables, whoever shares a prefix stands side by side. So a tree of prefixes is
nothing more than how much each sequence has in common with the next one.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


@dataclass(slots=True)
class SharedNodes:
    """The nodes of the tree that are worth sharing.

    Attributes:
        ranges: ``[4, nodes]``: first sequence, one past the last, first key, one past the last; parents first.
        private_from: for each sequence the first key that no node covers.
        saved_tokens: keys that need not be read again, a layer.
    """

    ranges: Ints
    private_from: Ints
    saved_tokens: int


def shared_nodes(common: Sequence[int], block_size: int, fewest_tokens: Sequence[int]) -> SharedNodes:
    """The nodes of a tree that are long enough; the others' keys are left to the nodes below them.

    Args:
        common: how many leading blocks neighbours have in common.
        block_size: tokens a block.
        fewest_tokens: from how many tokens on a node is worth sharing, by the number of sequences that share it.
    """
    nodes: list[int] = []
    private_from = [0] * (len(common) + 1)
    saved_tokens = 0
    for start, stop, shared_blocks in reversed(_common_intervals(common)):
        # Who is an ancestor of this one has been here before it.
        depth, shared = private_from[start], shared_blocks * block_size
        num_sequences = stop - start
        if shared - depth >= fewest_tokens[num_sequences]:
            nodes += (start, stop, depth, shared)
            private_from[start:stop] = [shared] * num_sequences
            saved_tokens += (num_sequences - 1) * (shared - depth)
    ranges = np.array(nodes, dtype=np.int64).reshape(-1, 4).T
    return SharedNodes(ranges, np.array(private_from, dtype=np.int64), saved_tokens)


def _common_intervals(common: Sequence[int]) -> list[tuple[int, int, int]]:
    """All largest groups of neighbours ``(first, one past the last, leading blocks in common)``, children before parents.

    In one pass with a stack of the groups that are still open (Abouelhoda, Kurtz and Ohlebusch 2004: the intervals of an
    array of longest common prefixes).
    """
    found: list[tuple[int, int, int]] = []
    below: list[tuple[int, int]] = []
    start, depth = 0, 0
    for place, blocks in enumerate(itertools.chain(common, (0,))):
        if blocks > depth:
            below.append((start, depth))
            start, depth = place, blocks
        while blocks < depth:
            found.append((start, place + 1, depth))
            if below[-1][1] < blocks:
                depth = blocks  # begins where the one that ends here does
            else:
                start, depth = below.pop()
    return found
