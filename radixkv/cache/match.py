"""How far a prompt is cached: the node in which it leaves the tree, and where in that node.

::

    path above the node | node: block, block, block ...
    prompt              |       block, blo                  num_node_blocks 1; partial_block: the node's second block
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.node import Node
from radixkv.cache.tokens import TOKEN_BYTES, common_tokens


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a prompt.

    Attributes:
        num_tokens: its length.
        node: the node in which it ends; it covers all nodes above.
        num_node_blocks: whole blocks of ``node`` that it covers.
        num_partial_tokens: tokens that it covers of the next block, if it ends inside one.
        partial_block: the id of that block; -1: it ends between blocks.
    """

    num_tokens: int
    node: Node
    num_node_blocks: int
    num_partial_tokens: int = 0
    partial_block: int = -1

    @property
    def num_whole_tokens(self) -> int:
        """Tokens in the prefix's whole blocks."""
        return self.num_tokens - self.num_partial_tokens

    @property
    def ends_node(self) -> bool:
        """Whether the prefix ends with the node's last block, and so goes on below it, or nowhere."""
        return not self.num_partial_tokens and self.num_node_blocks == self.node.num_blocks

    @property
    def num_evictable_blocks(self) -> int:
        """Whole blocks of the prefix that locking it takes from eviction."""
        if self.node.lock_count:
            return 0
        num_blocks, step = self.num_node_blocks, self.node.parent
        while step is not None and not step.lock_count:  # above a locked node, all are locked
            num_blocks += len(step.blocks)
            step = step.parent
        return num_blocks

    def at_block_end(self) -> Match:
        """The longest part of the prefix that ends with a block: a whole one, or all tokens of a partly filled one."""
        if not self.num_partial_tokens:
            return self
        node, before = self.node, self.node.block_bytes // TOKEN_BYTES * self.num_node_blocks
        if self.num_node_blocks + 1 == node.num_blocks and before + self.num_partial_tokens == node.num_tokens:
            return self
        if self.num_node_blocks or node.parent is None or node.parent.children is None:
            return Match(self.num_whole_tokens, node, self.num_node_blocks)
        # It ends inside a child's first block; the last block of a sibling may end before.
        siblings = node.parent.children
        ending = siblings.longest_prefix_of(node.tokens[: self.num_partial_tokens * TOKEN_BYTES])
        if ending is None:
            return Match(self.num_whole_tokens, node.parent, node.parent.num_blocks)
        leaf = siblings[ending]
        return Match(self.num_whole_tokens + leaf.num_tokens, leaf, 0, leaf.num_tokens, leaf.blocks[0])

    def path_blocks(self) -> BlockIds:
        """The ids of the prefix's whole blocks, in order."""
        last, *before = self.node.path()
        return np.concatenate(
            [*(node.block_ids() for node in reversed(before)), last.block_ids(0, self.num_node_blocks)]
        )


def match_in_first_block(node: Node, prompt: bytes, offset: int) -> Match:
    """The match of a prompt that covers ``node``, which ends at byte ``offset``, and no child's first block as a whole.

    It may share the first tokens of a child's first block.
    """
    assert node.children is not None
    key = prompt[offset : offset + node.block_bytes]
    num_before = offset // TOKEN_BYTES
    nearest, common = node.children.nearest(key)
    if nearest is None:
        return Match(num_before, node, node.num_blocks)
    return Match(num_before + common, nearest, 0, common, nearest.blocks[0])


def match_inside(child: Node, prompt: bytes, offset: int) -> Match:
    """The match of a prompt that covers, from byte ``offset`` on, the first block of ``child`` but not all of its tokens."""
    common = common_tokens(prompt, offset, child.tokens)
    whole, partial = divmod(common, child.block_bytes // TOKEN_BYTES)
    block = child.blocks[whole] if partial else -1
    return Match(offset // TOKEN_BYTES + common, child, whole, partial, block)
