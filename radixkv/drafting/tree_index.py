"""Where the last tokens of a sequence occur in what the radix tree holds of its namespace.

The index is kept up as the tree changes, and is bounded: 40 bytes per token that fits into the cache, rounded up to powers
of two, and 12 bytes per block. An entry is a slot of the pool (block id times block size, and the position in the block),
so that neither splits nor evictions need to find and change it: a look-up finds the node that has the block now, and
compares the tokens there. What is evicted thereby disappears at once.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from radixkv.cache.block_hash import namespace_hash
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.drafting.kgrams import MAX_RUN, RUN_LENGTHS, KGramTable, kgram_hash, kgram_hashes

# For each of `RUN_LENGTHS`, its table's entries per token. Tables are direct-mapped: with fewer entries, more runs would
# overwrite others; short runs need fewer, since fewer of them are distinct.
_ENTRIES_PER_TOKEN = (4, 4, 2)


class Occurrence(NamedTuple):
    """Where a run of tokens occurs.

    Attributes:
        node: of the tree.
        offset: how many tokens of the node come before the token that follows the run.
        length: of the run.
    """

    node: Node
    offset: int
    length: int


class TreeIndex(TreeObserver):
    """The index of one cache; give it to the cache as an observer."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._block_size = block_size
        num_tokens, entries = num_blocks * block_size, zip(RUN_LENGTHS, _ENTRIES_PER_TOKEN, strict=True)
        self._tables = {k: KGramTable(per_token * num_tokens) for k, per_token in entries}
        # For each block, the node that has it, and the number of blocks before it in the prefix, which no split changes.
        self._nodes: list[Node | None] = [None] * num_blocks
        self._depths = array("i", bytes(4 * num_blocks))
        self._offsets = np.arange(block_size, dtype=np.int32)

    @property
    def nbytes(self) -> int:
        """Size of the tables, and of the two numbers per block."""
        return sum(table.nbytes for table in self._tables.values()) + 12 * len(self._nodes)

    def find(self, sequence: Sequence[int], namespace: str) -> Occurrence | None:
        """Where the sequence's last tokens occurred within the namespace, if something follows there."""
        seed = namespace_hash(namespace)
        for k in RUN_LENGTHS:
            if len(sequence) < k:
                continue
            last = sequence[-k:]
            slot = self._tables[k].get(kgram_hash(last, seed))
            if slot < 0:
                continue
            block, offset = divmod(slot, self._block_size)
            node = self._nodes[block]
            if node is None or node.namespace != namespace:
                continue
            end = ((self._depths[block] - node.depth) * self._block_size + offset + 1) * TOKEN_BYTES
            goes_on = end < len(node.tokens) or node.children is not None
            if goes_on and end <= len(node.tokens) and _tail(node, end, k) == array("i", last).tobytes():
                return Occurrence(node, end // TOKEN_BYTES, k)
        return None

    # -- called by the tree --------------------------------------------------------------------------------------

    def on_insert(self, node: Node, start: int) -> None:
        """Note where the new blocks are, and the runs that end in them."""
        size, new_start = self._block_size, start * self._block_size
        for index in range(start, len(node.blocks)):
            block = node.blocks[index]
            self._nodes[block], self._depths[block] = node, node.depth + index
        blocks = np.array(node.blocks[start:], dtype=np.int32) * np.int32(size)
        slots = (blocks[:, None] + self._offsets).reshape(-1)[: node.num_tokens - new_start]
        seed = namespace_hash(node.namespace)
        before = _tail(node, new_start * TOKEN_BYTES, MAX_RUN - 1)
        tokens = np.frombuffer(before + node.tokens[new_start * TOKEN_BYTES :], dtype=np.int32)
        num_before = len(before) // TOKEN_BYTES
        for k, table in self._tables.items():
            first = max(num_before - k + 1, 0)
            if len(tokens) - first >= k:
                hashes = kgram_hashes(tokens[first:], k, seed)
                table.put_all(hashes, slots[len(slots) - len(hashes) :])

    def on_split(self, upper: Node, lower: Node) -> None:
        """Note that the blocks of the upper part have another node."""
        for block in upper.blocks:
            self._nodes[block] = upper

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        """Forget blocks whose tokens are no longer cached."""
        for block in node.blocks[start:]:
            self._nodes[block] = None

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        """Forget all blocks of a namespace, or everything."""
        for node in nodes:
            self.on_remove(node, 0, evicted=False)


def _tail(node: Node, end: int, num_tokens: int) -> bytes:
    """The last ``num_tokens`` encoded tokens before byte ``end`` of a node, or as many as the prefix has."""
    missing = num_tokens * TOKEN_BYTES
    parts: list[bytes] = []
    step: Node | None = node
    while step is not None and missing > 0:
        part = bytes(step.tokens[max(0, end - missing) : end])
        parts.append(part)
        missing -= len(part)
        step = step.parent
        end = 0 if step is None else len(step.tokens)
    return b"".join(reversed(parts))
