"""Reads many blocks of slots at a time, and compares each with its key.

Reading was measured on two cores of an Intel Xeon, shared and loaded, with blocks of 369 KB in the page cache: `preadv`
copied 4.1 GB/s and 3.3 with the checksum, in calls of a block or two. Longer calls lose, as blocks have left the
second-level cache when they are summed. A mapping copied 4.0 to 4.8 GB/s, but a disk that fails kills a process that reads
it so.

On one core of an AMD EPYC (Zen 4), loaded too, 62 such blocks took 4.6 ms of processor time through a buffer that stays in
the caches: 1.7 to read, 0.6 for checksums, 2.2 to copy them into a pool of 60 tensors. Read straight into those tensors, in
one call a block, they took 4.1 with checksums, 3.0 of it in the calls: too little gained for another way that only a disk
without encryption and a pool on the host could go.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from itertools import pairwise

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.record import RecordCodec, RecordLayout, Verdict
from radixkv.tiers.slot_files import MAX_BUFFERS, SlotFiles
from radixkv.tiers.tier import BlockBytes

PAGE_BYTES = 4096
CALL_BYTES = 256 << 10


def runs_of(slots: Sequence[int], slots_per_file: int, most: int) -> Iterator[range]:
    """The rows of ``slots`` that one call reads or writes: consecutive slots of one file, ``most`` at a time."""
    starts = [0] if slots else []
    for row, (before, slot) in enumerate(pairwise(slots), start=1):
        if slot != before + 1 or slot % slots_per_file == 0 or row - starts[-1] == most:
            starts.append(row)
    return (range(start, stop) for start, stop in pairwise([*starts, len(slots)]))


def slot_bytes_of(layout: RecordLayout) -> int:
    """Bytes of a slot: a record whose header is filled up such that slots begin with pages."""
    return -(-(layout.header_bytes + layout.body_bytes) // PAGE_BYTES) * PAGE_BYTES


class SlotReader:
    """Reads the slots of one format. Any thread may call.

    Args:
        codec: of the records.

    Attributes:
        slot_bytes: see `slot_bytes_of`.
        slots_per_call: slots that one call reads or writes.
    """

    def __init__(self, codec: RecordCodec) -> None:
        self._codec = codec
        self.slot_bytes = slot_bytes_of(codec)
        self.slots_per_call = min(max(1, CALL_BYTES // self.slot_bytes), MAX_BUFFERS // 2)
        self._local = threading.local()

    def read(
        self, files: SlotFiles, keys: Sequence[BlockKey], slots: Sequence[int], out: BlockBytes
    ) -> tuple[list[Verdict | None], list[OSError]]:
        """Read blocks from their slots.

        Args:
            files: with the slots.
            keys: of the blocks; as many as ``slots``, or more.
            slots: where they should be.
            out: a row per block.

        Returns:
            What each slot holds, None where it could not be read; and what the system said to that.
        """
        errors: list[OSError] = []
        # Slices of memory views cost a fraction of those of arrays.
        size, memory = out.shape[1], out.data.cast("B")
        blocks = [memory[start : start + size] for start in range(0, len(slots) * size, size)]

        verdicts: list[Verdict | None] = [None] * len(slots)
        for run in runs_of(slots, files.slots_per_file, self.slots_per_call):
            try:
                verdicts[run.start : run.stop] = self._read_run(files, keys, slots, blocks, run)
            except OSError as error:
                errors.append(error)
        return verdicts, errors

    def _read_run(
        self, files: SlotFiles, keys: Sequence[BlockKey], slots: Sequence[int], blocks: Sequence[memoryview], run: range
    ) -> list[Verdict]:
        heads, bodies = self._scratch()
        buffers: list[memoryview] = []
        for index, row in enumerate(run):
            buffers += (heads[index], bodies[index] if bodies else blocks[row])
        length = files.read(slots[run.start], buffers)
        verdicts = []
        for index, row in enumerate(run):
            if length < (index + 1) * self.slot_bytes:  # the file ends before
                verdicts.append(Verdict.CORRUPT)
            else:
                header = bytes(heads[index][: self._codec.header_bytes])
                verdicts.append(self._codec.decode(keys[row], header, buffers[2 * index + 1], blocks[row]))
        return verdicts

    def _scratch(self) -> tuple[list[memoryview], list[memoryview]]:
        """The thread's memory for one call: for what comes before bodies, and for bodies that are encrypted."""
        found: tuple[list[memoryview], list[memoryview]] | None = getattr(self._local, "scratch", None)
        if found is None:
            body_bytes = self._codec.body_bytes
            heads = [memoryview(bytearray(self.slot_bytes - body_bytes)) for _ in range(self.slots_per_call)]
            sealed = self.slots_per_call if self._codec.sealed else 0
            found = self._local.scratch = (heads, [memoryview(bytearray(body_bytes)) for _ in range(sealed)])
        return found
