"""Reads many blocks from slots at a time, and compares each with its key.

Where native code is available, one call without Python's lock reads many blocks, and checksums each while it is in the
processor's caches. In Python it takes several calls per block, in which threads wait for each other's lock.

Memory-mapped files are copied no faster, and a failing disk kills a process that reads them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.record import RecordCodec, RecordLayout, Verdict
from radixkv.tiers.tier import BlockBytes

PAGE_BYTES = 4096


def slot_bytes_of(layout: RecordLayout) -> int:
    """Bytes of a slot: a record, with its header padded so that each slot begins with a page."""
    return -(-(layout.header_bytes + layout.body_bytes) // PAGE_BYTES) * PAGE_BYTES


def verdict_on(files: SlotFiles, layout: RecordLayout, slot: int, digest: bytes) -> Verdict:
    """Whether a slot holds the block with a digest. Needs no key. One that cannot be read is corrupt, being as lost."""
    record = memoryview(bytearray(files.slot_bytes))
    try:
        length = files.read(slot, [record])
    except OSError:
        return Verdict.CORRUPT
    header = bytes(record[: layout.header_bytes])
    if length < len(record) or not layout.intact(header, record[-layout.body_bytes :]):
        return Verdict.CORRUPT
    return Verdict.RIGHT if layout.digest_of(header) == digest else Verdict.OTHER


class RecordsReader(Protocol):
    """Reads unencrypted records, many in a call; `radixkv_cpu.read_records` is one, and documents the arguments."""

    def __call__(
        self, places: Sequence[tuple[int, int]], headers: bytes, slot_bytes: int, rows: BlockBytes
    ) -> list[int]: ...


# Verdicts on a record that could be read, by what a `RecordsReader` returns for it.
_VERDICTS = (Verdict.RIGHT, Verdict.OTHER, Verdict.CORRUPT)


class SlotReader:
    """Reads the slots of one format. Any thread may call.

    Args:
        codec: of the records.
        read_records: reads records that are not encrypted; None: Python does.
    """

    def __init__(self, codec: RecordCodec, read_records: RecordsReader | None) -> None:
        self._codec = codec
        self._read_records = None if codec.sealed else read_records
        self._local = threading.local()

    def read(
        self, files: SlotFiles, keys: Sequence[BlockKey], slots: Sequence[int], out: BlockBytes
    ) -> tuple[list[Verdict | None], OSError | None]:
        """Read blocks from their slots, up to a call that fails.

        Args:
            files: with the slots.
            keys: of the blocks; as many as ``slots``, or more.
            slots: where they should be.
            out: a row per block.

        Returns:
            What each slot holds, None where it could not be read; and the system's error, if there was one.
        """
        if self._read_records is not None:
            return self._read_natively(self._read_records, files, keys, slots, out)
        # Slices of memory views cost a fraction of those of arrays.
        size, memory = out.shape[1], out.data.cast("B")
        blocks = [memory[start : start + size] for start in range(0, len(slots) * size, size)]

        verdicts: list[Verdict | None] = [None] * len(slots)
        try:
            for run in files.runs(slots):
                verdicts[run.start : run.stop] = self._read_run(files, keys, slots, blocks, run)
        except OSError as error:  # blocks behind it are of no use without it
            return verdicts, error
        return verdicts, None

    def _read_natively(
        self,
        read_records: RecordsReader,
        files: SlotFiles,
        keys: Sequence[BlockKey],
        slots: Sequence[int],
        out: BlockBytes,
    ) -> tuple[list[Verdict | None], OSError | None]:
        with files.places(slots) as (places, error):
            headers = b"".join(map(self._codec.header_of, keys[: len(places)]))
            outcomes = read_records(places, headers, files.slot_bytes, out[: len(places)])
        failed = min(outcomes, default=0)  # all that cannot be read fail for the same reason
        if failed < 0:
            error = OSError(-failed, os.strerror(-failed))
        verdicts = [None if outcome < 0 else _VERDICTS[outcome] for outcome in outcomes]
        return verdicts + [None] * (len(slots) - len(places)), error

    def _read_run(
        self, files: SlotFiles, keys: Sequence[BlockKey], slots: Sequence[int], blocks: Sequence[memoryview], run: range
    ) -> list[Verdict]:
        heads, bodies = self._scratch(files)
        buffers: list[memoryview] = []
        for index, row in enumerate(run):
            buffers += (heads[index], bodies[index] if bodies else blocks[row])
        length = files.read(slots[run.start], buffers)
        verdicts = []
        for index, row in enumerate(run):
            if length < (index + 1) * files.slot_bytes:  # the file ends before the slot does
                verdicts.append(Verdict.CORRUPT)
            else:
                header = bytes(heads[index][: self._codec.header_bytes])
                verdicts.append(self._codec.decode(keys[row], header, buffers[2 * index + 1], blocks[row]))
        return verdicts

    def _scratch(self, files: SlotFiles) -> tuple[list[memoryview], list[memoryview]]:
        """The thread's memory for one call: for what precedes each body, and for encrypted bodies."""
        found: tuple[list[memoryview], list[memoryview]] | None = getattr(self._local, "scratch", None)
        if found is None:
            body_bytes = self._codec.body_bytes
            heads = [memoryview(bytearray(files.slot_bytes - body_bytes)) for _ in range(files.slots_per_call)]
            sealed = files.slots_per_call if self._codec.sealed else 0
            found = self._local.scratch = (heads, [memoryview(bytearray(body_bytes)) for _ in range(sealed)])
        return found
