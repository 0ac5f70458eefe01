"""A cache's changes, and other events between them, as records for one reader."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cluster.records import HASH_BYTES, Kind, encode_hashes, encode_record


class RecordFeed(TreeObserver):
    """Collects records of a cache's changes, and others, for one reader, which takes them from another thread.

    Args:
        block_size: tokens per block.
        wake: called, on the thread that adds a record, when the feed was empty.
        max_hashes: most hashes that may wait. A reader that lets more wait is too slow, and must start over.

    Attributes:
        block_size: tokens per block.
        overflowed: whether the reader was too slow.
    """

    def __init__(self, block_size: int, wake: Callable[[], object], max_hashes: int = 1 << 20) -> None:
        self.overflowed = False
        self.block_size = block_size
        self._wake = wake
        self._max_bytes = max_hashes * HASH_BYTES
        self._records: list[bytes] = []
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self) -> bytes:
        """The records since the last call."""
        with self._lock:
            records, self._records, self._num_bytes = self._records, [], 0
        return b"".join(records)

    def append(self, record: bytes) -> None:
        """Add a record behind those that are there, on any thread."""
        with self._lock:
            if self.overflowed:
                return
            was_empty = not self._records
            self._num_bytes += len(record)
            self._records.append(record)
            if self._num_bytes > self._max_bytes:
                self.overflowed, self._records = True, []
        if was_empty or self.overflowed:
            self._wake()

    def on_insert(self, node: Node, start: int) -> None:
        self._add(Kind.STORED, self._hashes(node, start))

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        self._add(Kind.REMOVED, self._hashes(node, start))

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        if namespace is None:
            self.append(encode_record(Kind.CLEARED))
            return
        for node in nodes:
            self._add(Kind.REMOVED, self._hashes(node, 0))

    def _hashes(self, node: Node, start: int) -> bytes:
        """Hashes of the whole blocks only: a partly filled one gets another hash when it is full."""
        if not node.blocks:
            return b""
        whole = node.num_tokens // self.block_size
        hashes = node.block_hashes()[start:whole]
        return encode_hashes(hashes)

    def _add(self, kind: Kind, hashes: bytes) -> None:
        if hashes:
            self.append(encode_record(kind, hashes))
