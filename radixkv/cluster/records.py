"""What a replica reports, as a stream of records: which blocks it holds, which requests have come to it, and its load.

::

    byte      kind
    4 bytes   bytes that follow
    ...       STORED, REMOVED: hashes of blocks, 8 bytes each
              ARRIVED: the request's number, its number of tokens (`Prompt.num_tokens`), the hashes of its whole blocks
              PREFILLED, ENDED: the request's number
              LOAD: a JSON object
              HELD, CLEARED: nothing

Numbers are little-endian, of 8 bytes where nothing else is stated. A stream begins with HELD (its reader discards what it had
of the replica), STORED for all that the replica holds, and ARRIVED for the unfinished requests that its reader has not sent,
PREFILLED if their prompts are computed; then every change follows in order. The blocks of a prompt are STORED before it is
PREFILLED. Before HELD there may be LOADs.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.arguments import is_number
from radixkv.cluster.load import ReplicaLoad
from radixkv.engine.stats import SUMMED_GAUGES
from radixkv.routing import Router

_HEADER = struct.Struct("<BI")
_ARRIVED = struct.Struct("<QQ")
_NUMBER = struct.Struct("<Q")
_HASH = np.dtype("<u8")
HASH_BYTES = _HASH.itemsize
# Few enough that the reader can do other work between two records.
_HASHES_PER_RECORD = 4096
# Longest record; a node of a million tokens has hashes of half as many bytes.
_MAX_RECORD_BYTES = 16 << 20
# Numbers of a load are below it, so that sums and shares of them can be computed.
_MAX_NUMBER = 1 << 63


class Kind(IntEnum):
    """Kinds of records."""

    HELD = 0
    STORED = 1
    REMOVED = 2
    CLEARED = 3
    LOAD = 4
    ARRIVED = 5
    PREFILLED = 6
    ENDED = 7


@dataclass(frozen=True, slots=True)
class ArrivedRequest:
    """A request that has come to a replica.

    Attributes:
        number: the replica's name for it.
        num_tokens: of its prompt, and of its answers that were begun elsewhere.
        block_hashes: of its prompt's whole blocks; empty where it does not both read and write the cache.
    """

    number: int
    num_tokens: int
    block_hashes: Sequence[int]


def encode_record(kind: Kind, payload: bytes = b"") -> bytes:
    """A record."""
    return _HEADER.pack(kind, len(payload)) + payload


def encode_held(block_hashes: NDArray[np.uint64]) -> Iterator[bytes]:
    """The records that a stream begins with."""
    yield encode_record(Kind.HELD)
    for start in range(0, len(block_hashes), _HASHES_PER_RECORD):
        yield encode_record(Kind.STORED, encode_hashes(block_hashes[start : start + _HASHES_PER_RECORD]))


def encode_hashes(block_hashes: Sequence[int] | NDArray[np.uint64]) -> bytes:
    """What follows the header of a STORED or REMOVED record."""
    return np.array(block_hashes, dtype=_HASH).tobytes()


def decode_hashes(payload: bytes) -> list[int]:
    """What `encode_hashes` was given.

    Raises:
        ValueError: it is something else.
    """
    hashes: list[int] = np.frombuffer(payload, dtype=_HASH).tolist()
    return hashes


def encode_load(load: ReplicaLoad) -> bytes:
    """The record of a load."""
    return encode_record(Kind.LOAD, json.dumps(asdict(load), separators=(",", ":")).encode())


def decode_load(payload: bytes) -> ReplicaLoad:
    """What `encode_load` was given.

    Raises:
        ValueError: it is something else, or a number is out of range.
    """
    load = json.loads(payload)
    if (
        not isinstance(load, dict)
        or not isinstance(load.get("draining"), bool)
        or not isinstance(load.get("counters"), dict)
    ):
        raise ValueError(f"expected what a replica has to do, got {payload[:80]!r}")
    for name in SUMMED_GAUGES:
        if type(load.get(name)) is not int or not 0 <= load[name] < _MAX_NUMBER:
            raise ValueError(
                f"expected {name} of a replica as a whole number from 0 to 2**63 - 1, got {load.get(name)!r:.80}"
            )
    for value in load["counters"].values():
        if not is_number(value) or not 0 <= value < _MAX_NUMBER:
            raise ValueError(f"expected what a replica counts as numbers from 0 to 2**63 - 1, got {value!r:.80}")
    rate = load.get("prefill_seconds_per_token")
    if rate is not None and not (is_number(rate) and 0 < rate < _MAX_NUMBER):
        raise ValueError(f"expected seconds above 0 for a token of a prompt, got {rate!r:.80}")
    values: dict[str, Any] = {field.name: load.get(field.name) for field in fields(ReplicaLoad)}
    return ReplicaLoad(**values)


def encode_arrived(request: ArrivedRequest) -> bytes:
    """The record of a request that has come."""
    numbers = _ARRIVED.pack(request.number, request.num_tokens)
    return encode_record(Kind.ARRIVED, numbers + encode_hashes(request.block_hashes))


def decode_arrived(payload: bytes, block_size: int) -> ArrivedRequest:
    """What `encode_arrived` was given.

    Raises:
        ValueError: it is something else, or more blocks than a prompt of so many tokens has.
    """
    num_hash_bytes = len(payload) - _ARRIVED.size
    if num_hash_bytes < 0 or num_hash_bytes % HASH_BYTES:
        raise ValueError(f"expected a request and the hashes of its blocks, got {len(payload)} bytes")
    number, num_tokens = _ARRIVED.unpack_from(payload)
    num_blocks = num_hash_bytes // HASH_BYTES
    if num_tokens < max(1, num_blocks * block_size):
        raise ValueError(f"expected a prompt of at least {max(1, num_blocks * block_size)} tokens, got {num_tokens}")
    return ArrivedRequest(number, num_tokens, decode_hashes(payload[_ARRIVED.size :]))


def encode_number(kind: Kind, number: int) -> bytes:
    """The record of a request that is PREFILLED, or has ENDED, by its number in its `ArrivedRequest`."""
    return encode_record(kind, _NUMBER.pack(number))


def decode_number(payload: bytes) -> int:
    """The number of a request that is PREFILLED, or has ENDED.

    Raises:
        ValueError: it is something else.
    """
    if len(payload) != _NUMBER.size:
        raise ValueError(f"expected {_NUMBER.size} bytes, got {len(payload)}")
    number: int
    (number,) = _NUMBER.unpack(payload)
    return number


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


def update_router(router: Router, replica: str, kind: Kind, payload: bytes) -> None:
    """Update a router by a record of a replica that is no LOAD.

    Raises:
        ValueError: it is malformed.
    """
    match kind:
        case Kind.HELD:
            router.reset(replica)
        case Kind.STORED:
            router.stored(replica, decode_hashes(payload))
        case Kind.REMOVED:
            router.removed(replica, decode_hashes(payload))
        case Kind.CLEARED:
            router.cleared(replica)
        case Kind.ARRIVED:
            arrived = decode_arrived(payload, router.block_size)
            router.expect(replica, arrived.number, arrived.block_hashes, arrived.num_tokens)
        case Kind.PREFILLED:
            router.expected_prefilled(replica, decode_number(payload))
        case Kind.ENDED:
            router.expected_finished(replica, decode_number(payload))
