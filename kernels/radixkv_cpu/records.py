"""Records of blocks, read from files and compared with those that are wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library

CHECKED_BYTES = 24
"""Of a header: magic (8 bytes) and checksum (16), before what the checksum covers."""


class _Records(ctypes.Structure):
    """`Records` of ``src/calls.h``."""

    _fields_ = (
        *pointers("files", "offsets", "headers", "rows", "outcomes"),
        *sizes("num_records", "slot_bytes", "header_bytes", "row_bytes"),
    )


def read_records(
    places: Sequence[tuple[int, int]], headers: bytes, slot_bytes: int, rows: NDArray[np.uint8]
) -> list[int]:
    """Read records, and compare each with its header as it should be. One call without Python's lock; any thread may call.

    A record lies in a slot: its header at the beginning, its row at the end; what lies between is not read. A header is a
    magic number (8 bytes), a checksum (XXH3, 128 bits, of all that follows and of the row), and what says which record it is.

    Args:
        places: of the slots: an open file's descriptor, and an offset in bytes.
        headers: as they should be, one after the other, all of one length; what stands there for checksums is ignored.
        slot_bytes: of a slot.
        rows: ``[records, bytes]``; each is undefined unless its record is the wanted one.

    Returns:
        Of each record: 0: it is the wanted one; 1: it is intact, and another; 2: it is not intact, or the file ends before;
        less than 0: it could not be read, nor are those behind it: a number of `errno`, negated.

    Raises:
        RuntimeError: there is no library for this processor.
        ValueError: an argument is not as above; nothing is read.
    """
    library = require_library()
    count = len(places)
    if rows.dtype != np.uint8 or rows.ndim != 2 or len(rows) != count or not rows.flags.c_contiguous:
        raise ValueError(f"rows: expected contiguous bytes of {count} records, got {rows.dtype} {list(rows.shape)}")
    if not rows.flags.writeable:
        raise ValueError(f"rows: expected an array that can be written to, got a read-only one of {list(rows.shape)}")
    if not count:
        return []
    header_bytes, rest = divmod(len(headers), count)
    if rest or header_bytes < CHECKED_BYTES:
        raise ValueError(
            f"headers: expected {count} of one length of at least {CHECKED_BYTES} bytes, got {len(headers)}"
        )
    if slot_bytes < header_bytes + rows.shape[1]:
        raise ValueError(f"slot_bytes: expected at least {header_bytes + rows.shape[1]}, got {slot_bytes}")
    files = np.array([file for file, _ in places], dtype=np.int32)
    offsets = np.array([offset for _, offset in places], dtype=np.int64)
    outcomes = np.empty(count, dtype=np.int32)
    expected = np.frombuffer(headers, dtype=np.uint8)
    call = _Records(
        files.ctypes.data, offsets.ctypes.data, expected.ctypes.data, rows.ctypes.data, outcomes.ctypes.data,
        count, slot_bytes, header_bytes, rows.shape[1],
    )  # fmt: skip
    library.records(ctypes.addressof(call), False)
    return outcomes.tolist()
