"""Records of blocks, read from files and compared with those that are wanted."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library

CHECKED_BYTES = 24
"""Bytes of a header before those that the checksum covers: magic (8) and checksum (16)."""


class _Records(ctypes.Structure):
    """`Records` of ``src/calls.h``."""

    _fields_ = (
        *pointers("files", "offsets", "headers", "rows", "outcomes"),
        *sizes("num_records", "slot_bytes", "header_bytes", "row_bytes"),
    )


def read_records(
    places: Sequence[tuple[int, int]], headers: bytes, slot_bytes: int, rows: NDArray[np.uint8]
) -> list[int]:
    """Read records, and compare the header of each with the expected one, in one call without Python's lock.

    A record lies in a slot: its header at the beginning, its row at the end; bytes between them are not read. A header is a
    magic number (8 bytes), a checksum (XXH3, 128 bits, of the rest of the header and of the row), and fields that identify
    the record. Any thread may call.

    Args:
        places: each slot's file, an open descriptor, and its offset in bytes.
        headers: the expected ones, one after the other, all of one length; their checksums are ignored.
        slot_bytes: size of a slot.
        rows: ``[records, bytes]``; a row is undefined unless its record is the expected one.

    Returns:
        For each record, 0: it is the expected one; 1: it is an intact other one; 2: it is damaged, or the file ends before;
        below 0: it could not be read, for the negated `errno`, and those after it were not tried.

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
