"""What a replica reports, as a stream of records: which blocks it holds, and its load.

::

    byte      kind
    4 bytes   bytes that follow, little-endian
    ...       HELD, STORED, REMOVED: hashes of blocks, 8 bytes each, little-endian; LOAD: a JSON object

It begins with HELD (without hashes: what was known is forgotten) and STORED for all that the replica holds; then every change
follows in order.
"""

from __future__ import annotations

import json
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import AllCleared, BlocksRemoved, BlocksStored, CacheEvent
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES

_HEADER = struct.Struct("<BI")
_HASH = np.dtype("<u8")
# So few at once, because the reader has other work to do in between.
_HASHES_PER_RECORD = 4096
# Of a record; a node of a million tokens has hashes of half as many bytes.
_MAX_RECORD_BYTES = 16 << 20


class Kind(IntEnum):
    """What a record tells."""

    HELD = 0
    STORED = 1
    REMOVED = 2
    CLEARED = 3
    LOAD = 4


def encode_record(kind: Kind, payload: bytes = b"") -> bytes:
    """A record."""
    return _HEADER.pack(kind, len(payload)) + payload


def encode_held(block_hashes: NDArray[np.uint64]) -> Iterator[bytes]:
    """The records that a stream begins with."""
    yield encode_record(Kind.HELD)
    for start in range(0, len(block_hashes), _HASHES_PER_RECORD):
        yield encode_record(Kind.STORED, block_hashes[start : start + _HASHES_PER_RECORD].astype(_HASH).tobytes())


def encode_load(load: Mapping[str, Any]) -> bytes:
    """What a replica has to do."""
    return encode_record(Kind.LOAD, json.dumps(load, separators=(",", ":")).encode())


class RecordReader:
    """Cuts what comes into records."""

    def __init__(self) -> None:
        self._rest = b""

    def read(self, data: bytes) -> Iterator[tuple[Kind, bytes]]:
        """The records that are complete with ``data``, each with what follows its header.

        Raises:
            ValueError: it is no such stream.
        """
        data = self._rest + data
        offset = 0
        while len(data) - offset >= _HEADER.size:
            kind, length = _HEADER.unpack_from(data, offset)
            if length > _MAX_RECORD_BYTES:
                raise ValueError(f"expected records of at most {_MAX_RECORD_BYTES} bytes, got one of {length}")
            begin = offset + _HEADER.size
            if len(data) - begin < length:
                break
            yield Kind(kind), data[begin : begin + length]
            offset = begin + length
        self._rest = data[offset:]


def as_event(kind: Kind, payload: bytes, block_size: int) -> CacheEvent:
    """What a record other than LOAD means to a router."""
    if kind in (Kind.HELD, Kind.CLEARED):
        return AllCleared()
    hashes = tuple(np.frombuffer(payload, dtype=_HASH).tolist())
    if kind is Kind.STORED:
        return BlocksStored(hashes, None, (), block_size, 0, "")
    return BlocksRemoved(hashes, 0, "")


class BlockFeed(TreeObserver):
    """Collects a cache's changes for one reader, which takes them from another thread.

    Args:
        block_size: tokens per block.
        wake: called, on the cache's thread, when there is something to take and was nothing before.
        max_hashes: that may wait; beyond, the reader is too slow, and must begin anew.

    Attributes:
        overflowed: whether it was too slow.
    """

    def __init__(self, block_size: int, wake: Callable[[], object], max_hashes: int = 1 << 20) -> None:
        self.overflowed = False
        self._block_size = block_size
        self._wake = wake
        self._max_bytes = max_hashes * _HASH.itemsize
        self._records: list[bytes] = []
        self._num_bytes = 0
        self._lock = threading.Lock()

    def take(self) -> bytes:
        """The records since the last call."""
        with self._lock:
            records, self._records, self._num_bytes = self._records, [], 0
        return b"".join(records)

    def on_insert(self, node: Node, start: int) -> None:
        self._add(Kind.STORED, self._hashes(node, start))

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        self._add(Kind.REMOVED, self._hashes(node, start))

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        if namespace is None:
            self._append(encode_record(Kind.CLEARED))
            return
        for node in nodes:
            self._add(Kind.REMOVED, self._hashes(node, 0))

    def _hashes(self, node: Node, start: int) -> bytes:
        """Of the whole blocks only: a partly filled one has another name when it is full."""
        if not node.blocks:
            return b""
        whole = node.num_tokens // self._block_size
        hashes = node.block_hashes(self._block_size * TOKEN_BYTES)[start:whole]
        return np.array(hashes, dtype=_HASH).tobytes()

    def _add(self, kind: Kind, hashes: bytes) -> None:
        if hashes:
            self._append(encode_record(kind, hashes))

    def _append(self, record: bytes) -> None:
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
