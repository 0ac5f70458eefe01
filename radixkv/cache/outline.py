"""The most recently used part of a radix tree, in bounded time: for pictures of trees too large to show or to copy."""

from __future__ import annotations

import heapq
import itertools
import zlib
from dataclasses import dataclass

from radixkv.cache.node import Node
from radixkv.cache.tokens import TOKEN_BYTES

# How many of each node's tokens are kept.
_BEGINNING_TOKENS = 32


@dataclass(frozen=True, slots=True)
class NodeOutline:
    """One node without its blocks and most of its tokens.

    Attributes:
        key: identifies it among its siblings, which differ in their first block; the same in every outline.
        beginning: its first tokens, encoded.
        num_tokens, num_blocks: of its edge.
        lock_count: live sequences and pins that end here or below.
        last_use: see `EvictableLeaf`.
        num_hidden: children that are not among ``children``.
    """

    key: int
    beginning: bytes
    num_tokens: int
    num_blocks: int
    lock_count: int
    last_use: float
    num_hidden: int
    children: tuple[NodeOutline, ...]


def outline(root: Node, max_nodes: int, max_visited: int = 2000) -> NodeOutline:
    """``root`` and the ``max_nodes`` nodes below it that were used last.

    A node was used at least as recently as any below it, so they are found best first, from the root down. Children are
    shown in the order of their tokens, so that a picture stays as it is while the tree grows elsewhere.

    Args:
        max_visited: nodes looked at; of a node with more children only the first are.
    """
    shown: list[Node] = [root]
    below: dict[Node, list[Node]] = {root: []}
    order = itertools.count()
    candidates: list[tuple[float, int, Node]] = []
    num_visited = 0
    while True:
        for child in itertools.islice((shown[-1].children or {}).values(), max_visited - num_visited):
            heapq.heappush(candidates, (-child.last_use, next(order), child))
            num_visited += 1
        if not candidates or len(shown) > max_nodes:
            break
        node = heapq.heappop(candidates)[2]
        assert node.parent is not None
        shown.append(node)
        below[node] = []
        below[node.parent].append(node)
    done: dict[Node, NodeOutline] = {}
    for node in reversed(shown):  # children before their parents
        done[node] = NodeOutline(
            key=zlib.crc32(node.tokens[: node.block_bytes]),
            beginning=bytes(node.tokens[: _BEGINNING_TOKENS * TOKEN_BYTES]),
            num_tokens=node.num_tokens,
            num_blocks=node.num_blocks,
            lock_count=node.lock_count,
            last_use=node.last_use,
            num_hidden=len(node.children or ()) - len(below[node]),
            children=tuple(done[child] for child in sorted(below[node], key=_first_tokens)),
        )
    return done[root]


def _first_tokens(node: Node) -> bytes:
    # Enough to order siblings, which differ in their first block, without copying a long edge.
    return bytes(node.tokens[: 256 * TOKEN_BYTES])
