"""The radix tree as plain data."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.node import Node
from radixkv.cache.tokens import decode


@dataclass(frozen=True, slots=True)
class NodeSnapshot:
    """One node: the tokens and blocks of its edge, its locks and uses, and its children.

    Attributes:
        lock_count: live sequences and pins that end here or below.
        last_use, uses: see `EvictableLeaf`.
    """

    tokens: NDArray[np.int32]
    block_ids: NDArray[np.int32]
    lock_count: int
    last_use: float
    uses: int
    children: tuple[NodeSnapshot, ...]


def snapshot(root: Node) -> NodeSnapshot:
    """A copy of ``root`` and everything below it."""
    # Bottom-up without recursion: a tree may be deeper than Python's stack.
    order = [root]
    for node in order:
        order.extend(node.children.values() if node.children else ())
    done: dict[int, NodeSnapshot] = {}
    for node in reversed(order):
        children = tuple(done.pop(id(child)) for child in (node.children.values() if node.children else ()))
        done[id(node)] = NodeSnapshot(
            decode(node.tokens), node.block_ids(), node.lock_count, node.last_use, node.uses, children
        )
    return done[id(root)]
