"""The radix tree's nodes: an edge with its tokens and blocks, and the children below it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import Any

import numpy as np

from radixkv.cache.block_hash import namespace_hash, next_hashes
from radixkv.cache.block_pool import BlockIds
from radixkv.cache.children import Children
from radixkv.cache.tokens import TOKEN_BYTES


class Node:
    """One edge and the children below it.

    Attributes:
        tokens: the edge's token ids, encoded.
        blocks: the edge's block ids; the tree owns one reference to each.
        lock_count: tables and pins that end in this node or below it. Each is an owner of all of the node's blocks,
            besides the tree; a locked node cannot be evicted.
        num_pins: how many of these are pins.
        last_use, uses, priority, group: see `EvictableLeaf`.
        depth: blocks of the prefix before it.
        block_bytes: size of a whole block's encoded tokens.
        owner: who computed it: see `owner_limits`.
        is_branch_point: a leaf of one partly filled block that stays beside fuller ones which begin with its tokens
            (`PrefixCache.branch`).
        hashes: of its first blocks (see `block_hash`), as many as `block_hashes` has computed.

    Copies and pickles of a node have neither parent nor children: the tree's own restore them (`link`).
    """

    __slots__ = (
        "block_bytes",
        "blocks",
        "children",
        "depth",
        "group",
        "hashes",
        "is_branch_point",
        "last_use",
        "lock_count",
        "namespace",
        "num_pins",
        "owner",
        "parent",
        "priority",
        "tokens",
        "uses",
    )

    def __init__(self, parent: Node | None, tokens: bytearray, blocks: array[int], last_use: float) -> None:
        self.parent = parent
        self.namespace: str = "" if parent is None else parent.namespace
        self.depth: int = 0 if parent is None else parent.depth + len(parent.blocks)
        self.block_bytes: int = 0 if parent is None else parent.block_bytes
        self.uses = 1
        self.priority = 0
        self.group = 0
        self.owner = ""
        self.is_branch_point = False
        self.hashes: array[int] | None = None
        self.tokens = tokens
        self.blocks: array[int] = blocks
        self.children: Children[Node] | None = None  # None: a leaf, as most nodes are
        self.lock_count = self.num_pins = 0
        self.last_use = last_use

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in Node.__slots__ if name not in ("parent", "children")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.parent = self.children = None
        for name, value in state.items():
            setattr(self, name, value)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens) // TOKEN_BYTES

    @property
    def parent_uses(self) -> int:
        return 0 if self.parent is None else self.parent.uses

    def block_ids(self, start: int = 0, stop: int | None = None) -> BlockIds:
        return np.array(self.blocks[start:stop], dtype=np.int32)

    def block_hashes(self) -> array[int]:
        """The hash of each block; of a root, that of its namespace. Computed at the first call, and after growth."""
        done, size = self.hashes, self.block_bytes
        if done is not None and len(done) >= len(self.blocks):
            return done
        incomplete, step = [self], self.parent
        while step is not None and (step.hashes is None or len(step.hashes) < len(step.blocks)):
            incomplete.append(step)
            step = step.parent
        for step in reversed(incomplete):
            assert step.parent is not None and step.parent.hashes is not None
            if step.hashes is None:
                step.hashes = array("Q")
            before = step.hashes[-1] if step.hashes else step.parent.hashes[-1]
            step.hashes.extend(next_hashes(before, bytes(step.tokens[len(step.hashes) * size :]), size))
        assert self.hashes is not None
        return self.hashes

    def link(self, child: Node) -> None:
        """Make ``child`` one of this node's children."""
        if self.children is None:
            self.children = Children()
        self.children[bytes(child.tokens[: self.block_bytes])] = child
        child.parent = self

    def split(self, num_blocks: int) -> Node:
        """Cut the edge after ``num_blocks``; returns the new upper part. The lower stays the node that others have locked."""
        assert self.parent is not None and self.parent.children is not None
        size = num_blocks * self.block_bytes
        upper = Node(self.parent, self.tokens[:size], self.blocks[:num_blocks], self.last_use)
        upper.lock_count, upper.num_pins = self.lock_count, self.num_pins
        upper.uses, upper.priority, upper.group, upper.owner = self.uses, self.priority, self.group, self.owner
        if self.hashes is not None:
            upper.hashes, self.hashes = self.hashes[:num_blocks], self.hashes[num_blocks:]
        self.parent.children[bytes(self.tokens[: self.block_bytes])] = upper
        del self.tokens[:size]
        del self.blocks[:num_blocks]
        upper.link(self)
        self.depth += num_blocks
        return upper

    def truncate(self, num_blocks: int) -> None:
        """Drop all but the first ``num_blocks``."""
        del self.blocks[num_blocks:]
        del self.tokens[num_blocks * self.block_bytes :]
        if self.hashes is not None:
            del self.hashes[num_blocks:]

    def path(self) -> Iterator[Node]:
        """This node and its ancestors, up to the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


class Root(Node):
    """The root of a namespace. It has no tokens and no blocks, and is removed when it has neither children nor locks."""

    __slots__ = ()

    def __init__(self, namespace: str, block_bytes: int) -> None:
        super().__init__(None, bytearray(), array("i"), 0)
        self.namespace = namespace
        self.block_bytes = block_bytes
        self.hashes = array("Q", [namespace_hash(namespace)])
