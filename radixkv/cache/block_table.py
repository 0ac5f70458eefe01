"""One sequence's map from token positions to physical blocks."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.node import Node
from radixkv.cache.tokens import decode


class BlockTable:
    """The blocks of one live sequence. `PrefixCache` makes, grows, forks and closes it; everybody else only reads.

    Attributes:
        namespace: whose prefixes it shares.
        num_prompt_tokens: length of the prompt that it was opened with.
        priority: of what it computes and uses, for policies that ask.
        num_cached_tokens: how many of those were found, and are in its blocks from the start.
        version: incremented when the block of an already reserved position changes (copy-on-write, or a block that turned
            out to be known), so that whoever derived something from ``block_ids`` knows.
        closed: it has let go of its blocks and can no longer be used.
    """

    __slots__ = (
        "_ids",
        "_node",
        "_num_blocks",
        "_num_published",
        "_num_tokens",
        "_num_unaccounted",
        "_num_writable",
        "_past",
        "_tail",
        "_write",
        "closed",
        "namespace",
        "num_cached_tokens",
        "num_prompt_tokens",
        "priority",
        "version",
    )

    def __init__(self, namespace: str, num_prompt_tokens: int, write: bool, priority: int) -> None:
        self.namespace = namespace
        self.priority = priority
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = 0
        self.version = 0
        self.closed = False
        # The rest belongs to the cache. The leading blocks are the tree's, kept by a lock on the node that ends with
        # them; the others are counted in the pool as the table's own::
        #
        #     _ids    [ tree's: _num_published | own: tail, then reserved ]
        #     _tail                            tokens of the own blocks, encoded
        self._ids: BlockIds = np.empty(0, dtype=np.int32)
        self._tail = bytearray()
        self._num_blocks = 0
        self._num_published = 0
        self._num_tokens = 0
        self._num_writable = 0  # positions below this, from num_tokens on, lie in blocks that nobody else owns
        self._num_unaccounted = 0  # prompt tokens neither reused nor computed yet
        self._past: Sequence[
            tuple[int, int]
        ] = ()  # blocks before this one had been used so often before they were evicted
        self._write = write
        self._node: Node | None = None  # the locked node; None once the cache was cleared under the table

    @property
    def block_ids(self) -> BlockIds:
        """The physical block of each ``block_size`` positions, reserved ones included; a view, int32."""
        return self._ids[: self._num_blocks]

    @property
    def num_blocks(self) -> int:
        return self._num_blocks

    @property
    def num_tokens(self) -> int:
        """Tokens whose keys and values are in the blocks."""
        return self._num_tokens

    @property
    def tokens(self) -> NDArray[np.int32]:
        """Those tokens' ids, a copy."""
        return decode(self._encoded_tokens())

    def _encoded_tokens(self) -> bytes:
        path = [] if self._node is None else [node.tokens for node in self._node.path()]
        return b"".join([*reversed(path), self._tail])

    def _fork(self, filled: BlockIds) -> BlockTable:
        """Another table over the same blocks, of which the first that have tokens in them are ``filled``; counts no owner."""
        child = BlockTable(self.namespace, self.num_prompt_tokens, self._write, self.priority)
        child.num_cached_tokens = self.num_cached_tokens
        child._ids = filled.copy()
        child._num_blocks = len(filled)
        child._tail += self._tail
        child._num_tokens = child._num_writable = self._num_tokens
        child._num_published = self._num_published
        child._node = self._node
        return child

    def _last_block(self) -> int | None:
        return int(self._ids[self._num_blocks - 1]) if self._num_blocks else None

    def _add_block(self, block: int) -> None:
        if self._num_blocks == len(self._ids):
            self._make_room(self._num_blocks + 1)
        self._ids[self._num_blocks] = block
        self._num_blocks += 1

    def _add_blocks(self, blocks: BlockIds) -> None:
        total = self._num_blocks + len(blocks)
        if total > len(self._ids):
            self._make_room(total)
        self._ids[self._num_blocks : total] = blocks
        self._num_blocks = total

    def _make_room(self, total: int) -> None:
        # Doubling: a sequence that grows by one block at a time must not copy its table each time.
        grown = np.empty(max(total, 2 * len(self._ids)), dtype=np.int32)
        grown[: self._num_blocks] = self._ids[: self._num_blocks]
        self._ids = grown
