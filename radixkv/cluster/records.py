"""What a replica reports, as a stream of records: which blocks it holds, and its load.

::

    byte      kind
    4 bytes   bytes that follow, little-endian
    ...       STORED, REMOVED: hashes of blocks, 8 bytes each, little-endian; LOAD: a JSON object; HELD, CLEARED: nothing

It begins with HELD (what was known is forgotten) and STORED for all that the replica holds; then every change
follows in order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import AllCleared, BlocksRemoved, BlocksStored, CacheEvent

_HEADER = struct.Struct("<BI")
_HASH = np.dtype("<u8")
HASH_BYTES = _HASH.itemsize
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


def encode_hashes(block_hashes: Sequence[int]) -> bytes:
    """What follows the header of a STORED or REMOVED record."""
    return np.array(block_hashes, dtype=_HASH).tobytes()


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
            ValueError: it is not a stream of records.
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
