"""Records the changes of a radix tree as events."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.block_hash import namespace_hash
from radixkv.cache.events import AllCleared, BlocksRemoved, BlocksStored, EventLog
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES, decode


class EventRecorder(TreeObserver):
    """Appends an event to ``log`` for every change of the tree.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, log: EventLog, block_size: int) -> None:
        self._log = log
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES

    def on_insert(self, node: Node, start: int) -> None:
        assert node.parent is not None
        hashes = node.block_hashes(self._block_bytes)
        if start:
            parent_hash: int | None = hashes[start - 1]
        elif node.parent.parent is not None:
            parent_hash = node.parent.block_hashes(self._block_bytes)[-1]
        else:
            parent_hash = None  # the parent is the root: the blocks begin a prefix
        self._log.add(
            BlocksStored(
                tuple(hashes[start:]),
                parent_hash,
                tuple(decode(node.tokens[start * self._block_bytes :]).tolist()),
                self._block_size,
                namespace_hash(node.namespace),
                self._log.medium,
            )
        )

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        hashes = node.block_hashes(self._block_bytes)
        self._log.add(BlocksRemoved(tuple(hashes[start:]), namespace_hash(node.namespace), self._log.medium))

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        if namespace is None:
            self._log.add(AllCleared())
            return
        for node in nodes:
            if node.blocks:
                self.on_remove(node, 0, evicted=False)
