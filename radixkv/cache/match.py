"""How far a prompt is cached: the node in which it leaves the tree, and where in that node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.node import Node
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """How far a prompt is cached.

    Attributes:
        num_tokens: length of the longest cached prefix.
        node: the node in which it ends.
        num_node_blocks: whole blocks of ``node`` that it covers; all of the path above is covered.
        partial_block: the block that holds the prefix's last ``num_partial_tokens``, where it ends inside one.
    """

    num_tokens: int
    node: Node
    num_node_blocks: int
    num_partial_tokens: int = 0
    partial_block: int = -1

    @property
    def num_whole_tokens(self) -> int:
        """Length of the prefix's whole blocks."""
        return self.num_tokens - self.num_partial_tokens

    @property
    def ends_node(self) -> bool:
        """Whether the prefix ends with the node's last block, and so goes on below it, or nowhere."""
        return not self.num_partial_tokens and self.num_node_blocks == self.node.num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Whole blocks of the prefix that could be evicted, and cannot be once it is locked."""
        if self.node.lock_count:
            return 0
        num_blocks, step = self.num_node_blocks, self.node.parent
        while step is not None and not step.lock_count:  # above a locked node, all are locked
            num_blocks += len(step.blocks)
            step = step.parent
        return num_blocks

    def path_blocks(self) -> BlockIds:
        """The whole blocks of the prefix, from the first on."""
        last, *before = self.node.path()
        return np.concatenate(
            [*(node.block_ids() for node in reversed(before)), last.block_ids(0, self.num_node_blocks)]
        )


def match_in_first_block(node: Node, prompt: bytes, offset: int) -> Match:
    """A prompt that leaves the tree behind ``node``, at byte ``offset``: its next block may begin like a child's."""
    assert node.children is not None
    key = prompt[offset : offset + node.block_bytes]
    num_before = offset // TOKEN_BYTES
    nearest, common = node.children.nearest(key)
    if nearest is None:
        return Match(num_before, node, node.num_blocks)
    return Match(num_before + common, nearest, 0, common, nearest.blocks[0])


def match_inside(child: Node, prompt: bytes, offset: int) -> Match:
    """A prompt whose bytes from ``offset`` on begin with the first block of ``child``, and end or differ further on in it."""
    common = common_tokens(prompt, offset, child.tokens)
    whole, partial = divmod(common, child.block_bytes // TOKEN_BYTES)
    block = child.blocks[whole] if partial else -1
    return Match(offset // TOKEN_BYTES + common, child, whole, partial, block)
