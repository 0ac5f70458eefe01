"""Records read from files and compared, for every compiled variant, against the checksums of the xxhash package."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.cpu_variants import each_variant, use

from radixkv_cpu import read_records

MAGIC = b"magic no"
SLOT = 1024
RIGHT, OTHER, CORRUPT = 0, 1, 2


def record(seed: int, row_bytes: int, field_bytes: int = 24, slot_bytes: int = SLOT) -> tuple[bytes, bytes]:
    """A header and a slot with it."""
    rng = np.random.default_rng(seed)
    fields, row = rng.bytes(field_bytes), rng.bytes(row_bytes)
    header = MAGIC + xxhash.xxh3_128_digest(fields + row) + fields
    return header, header.ljust(slot_bytes - row_bytes, b"?") + row


@pytest.fixture
def file(tmp_path: Path) -> Iterator[int]:
    descriptor = os.open(tmp_path / "slots", os.O_RDWR | os.O_CREAT)
    yield descriptor
    os.close(descriptor)


def poisoned(count: int, row_bytes: int) -> Any:
    return np.full((count, row_bytes), 0xAA, np.uint8)


@each_variant
@pytest.mark.parametrize("row_bytes", [1, 16, 100, 257, 5000, 70_001])
def test_records_are_read_wherever_they_lie(variant: str, file: int, row_bytes: int) -> None:
    """For each of these sizes, the checksum takes another algorithm."""
    size = row_bytes + 100
    headers, slots = zip(*(record(seed, row_bytes, slot_bytes=size) for seed in range(3)), strict=True)
    os.pwrite(file, b"".join(slots), 7)
    around = poisoned(5, row_bytes)
    with use(variant):
        places = [(file, 7 + 2 * size), (file, 7), (file, 7 + size)]
        forgotten = bytes(16)  # what stands for the checksum is not looked at
        expected = b"".join(headers[i][:8] + forgotten + headers[i][24:] for i in (2, 0, 1))
        assert read_records(places, expected, size, around[1:4]) == [RIGHT] * 3
    assert [row.tobytes() for row in around[1:4]] == [slots[i][-row_bytes:] for i in (2, 0, 1)]
    assert (around[[0, 4]] == 0xAA).all()


@each_variant
def test_every_flipped_bit_is_seen(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    with use(variant):
        for at in [*range(len(header)), *range(SLOT - 100, SLOT)]:
            os.pwrite(file, slot[:at] + bytes([slot[at] ^ 1 << at % 8]) + slot[at + 1 :], 0)
            assert read_records([(file, 0)], header, SLOT, poisoned(1, 100)) == [CORRUPT]
        at = len(header)  # nothing is there
        os.pwrite(file, slot[:at] + b"!" + slot[at + 1 :], 0)
        assert read_records([(file, 0)], header, SLOT, poisoned(1, 100)) == [RIGHT]


@each_variant
def test_an_intact_record_is_another_where_any_field_differs(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    os.pwrite(file, slot, 0)
    with use(variant):
        for at in range(24, len(header)):
            wanted = header[:at] + bytes([header[at] ^ 1]) + header[at + 1 :]
            assert read_records([(file, 0)], wanted, SLOT, poisoned(1, 100)) == [OTHER]
        wanted = b"another." + header[8:]
        assert read_records([(file, 0)], wanted, SLOT, poisoned(1, 100)) == [CORRUPT]


@each_variant
def test_a_file_that_ends_before_its_record_is_corrupt(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    with use(variant):
        for length in (0, 5, len(header), SLOT - 100, SLOT - 1):
            os.ftruncate(file, 0)
            os.pwrite(file, slot[:length], 0)
            assert read_records([(file, 0), (file, SLOT)], header * 2, SLOT, poisoned(2, 100)) == [CORRUPT, CORRUPT]


@each_variant
def test_what_lies_between_a_header_and_its_row_takes_no_memory(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    os.pwrite(file, slot, 0)
    with use(variant):
        assert read_records([(file, 0)], header, 2**62, poisoned(1, 100)) == [CORRUPT]


@each_variant
def test_read_only_rows_are_not_written_to(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    os.pwrite(file, slot, 0)
    rows = poisoned(1, 100)
    rows.flags.writeable = False
    with (
        use(variant),
        pytest.raises(ValueError, match=r"rows: expected an array that can be written to, got .* \[1, 100\]"),
    ):
        read_records([(file, 0)], header, SLOT, rows)
    assert (rows == 0xAA).all()


@each_variant
def test_what_cannot_be_read_says_why_and_nothing_behind_it_is_tried(variant: str, file: int) -> None:
    header, slot = record(1, 100)
    os.pwrite(file, slot, 0)
    rows = poisoned(3, 100)
    with use(variant):
        outcomes = read_records([(file, 0), (-1, 0), (file, 0)], header * 3, SLOT, rows)
        assert outcomes == [RIGHT, -errno.EBADF, -errno.EBADF]
        assert (rows[2] == 0xAA).all()
        assert read_records([], b"", SLOT, poisoned(0, 100)) == []


@each_variant
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("rows", poisoned(1, 100), r"rows: expected contiguous bytes of 2 records, got uint8 \[1, 100\]"),
        ("rows", poisoned(2, 100).astype(np.int8), "rows: expected contiguous bytes of 2 records, got int8"),
        ("rows", poisoned(2, 200)[:, ::2], "rows: expected contiguous bytes of 2 records"),
        ("rows", poisoned(2, 100)[0], "rows: expected contiguous bytes of 2 records"),
        ("headers", bytes(97), "headers: expected 2 of one length of at least 24 bytes, got 97"),
        ("headers", bytes(46), "headers: expected 2 of one length of at least 24 bytes, got 46"),
        ("slot_bytes", 147, "slot_bytes: expected at least 148, got 147"),
    ],
)
def test_bad_arguments_are_refused(variant: str, file: int, name: str, value: Any, message: str) -> None:
    arguments: dict[str, Any] = {
        "places": [(file, 0), (file, SLOT)],
        "headers": bytes(96),
        "slot_bytes": SLOT,
        "rows": poisoned(2, 100),
    }
    with use(variant), pytest.raises(ValueError, match=message):
        read_records(**arguments | {name: value})
