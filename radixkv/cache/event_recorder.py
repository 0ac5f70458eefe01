"""Records the changes of a radix tree as events."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.cache.block_hash import namespace_hash
from radixkv.cache.events import AllCleared, BlocksRemoved, BlocksStored, EventLog
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES, decode


class EventRecorder(TreeObserver):
    """Appends an event to ``log`` for every change of the tree."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def on_insert(self, node: Node, start: int) -> None:
        assert node.parent is not None
        hashes = node.block_hashes()
        if start:
            parent_hash: int | None = hashes[start - 1]
        elif node.parent.parent is not None:
            parent_hash = node.parent.block_hashes()[-1]
        else:
            parent_hash = None  # the parent is the root: the blocks begin a prefix
        self._log.add(
            BlocksStored(
                tuple(hashes[start:]),
                parent_hash,
                tuple(decode(node.tokens[start * node.block_bytes :]).tolist()),
                node.block_bytes // TOKEN_BYTES,
                namespace_hash(node.namespace),
                self._log.medium,
            )
        )

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        self._log.add(
            BlocksRemoved(tuple(node.block_hashes()[start:]), namespace_hash(node.namespace), self._log.medium)
        )

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        if namespace is None:
            self._log.add(AllCleared())
            return
        for node in nodes:
            if node.blocks:
                self.on_remove(node, 0, evicted=False)
