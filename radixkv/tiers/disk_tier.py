"""A tier on a disk of this machine, whose blocks are found again after a restart."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from radixkv.cache.arguments import check_count, check_path
from radixkv.tiers.backoff import Backoff
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.open_store import FoundBlocks, MediumErrors
from radixkv.tiers.disk.slot_reader import RecordsReader, SlotReader, slot_bytes_of
from radixkv.tiers.disk.slot_table import SlotTable
from radixkv.tiers.disk.store_reader import StoreReader
from radixkv.tiers.disk.store_writer import StoreWriter
from radixkv.tiers.disk.stored_pins import StoredPins
from radixkv.tiers.record import RecordCodec, Verdict
from radixkv.tiers.stats import StoreCounters, StoreStats
from radixkv.tiers.tier import BlockBytes


class DiskTier:
    """A tier in a folder of one disk; see `radixkv.tiers.disk.store_folder` for what is in it.

    The index is read into memory when the store is opened, blocks only when they are asked for. A thread writes. The least
    recently put or read blocks are evicted first; of a prefix, its last ones.

    Args:
        root: the folder, made if it is not there. Stores of several formats may be in it.
        block_format: of the blocks.
        capacity_bytes: of the slots, at least one; rounded down to whole ones.
        queue_bytes: of blocks that may wait to be written; any beyond that are dropped.
        key: encrypts the blocks, 32 bytes; None: they are stored as they are.
        secret: of the names of namespaces, to be kept in ``root``. A root with another one is not used. None: it is kept
            elsewhere.
        read_only: read what another process writes; never put, clear or forget anything.
        read_records: see `radixkv.tiers.disk.slot_reader.SlotReader`.
        clock: seconds, for statistics and for when to try a failed disk again.

    Attributes:
        medium: "disk".
        pins: those in this store.
        table: of its blocks; empty if the store is only read.

    Raises:
        ImportError: a key is given, and cryptography is not installed.
        StoreInUseError: another process writes to the store. A disk that fails raises nothing.
        ValueError: an argument is invalid.
    """

    medium = "disk"

    def __init__(
        self,
        root: Path,
        block_format: BlockFormat,
        *,
        capacity_bytes: int,
        queue_bytes: int = 256 << 20,
        key: bytes | None = None,
        secret: bytes | None = None,
        read_only: bool = False,
        read_records: RecordsReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_path("root", root)
        check_count("queue_bytes", queue_bytes, 1)
        self._codec = RecordCodec(block_format, key)
        self._reader = SlotReader(self._codec, read_records)
        slot_bytes = slot_bytes_of(self._codec)
        check_count("capacity_bytes", capacity_bytes, slot_bytes)
        self._clock = clock
        self._counters = StoreCounters()
        self._reads = Backoff(f"reading {root}", clock)
        self._writer: StoreWriter | None = None
        self._store: StoreReader | StoreWriter
        if read_only:
            self._store = StoreReader(root, self._codec, secret, clock)
            self.table, self.pins = SlotTable(), StoredPins(self._codec, lambda: None)
            self._find([])  # warns at once if there is no store
        else:
            self._store = self._writer = StoreWriter(
                root,
                self._codec,
                capacity=capacity_bytes // slot_bytes,
                queue_bytes=queue_bytes,
                counters=self._counters,
                secret=secret,
                clock=clock,
            )
            self.table, self.pins = self._writer.table, self._writer.pins

    @property
    def stats(self) -> StoreStats:
        return self._counters.read()

    def __len__(self) -> int:
        """How many blocks there are; of a store that is only read, when it was opened last, or since."""
        return len(self._store)

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        return len(self._find(keys).blocks)

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        """See `radixkv.tiers.tier.PartlyFilledKeeper`."""
        return next((row for row, key in enumerate(keys) if self._find([key]).blocks), None)

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        self._codec.check_rows(keys, out)
        begin = self._clock()
        count = self._get(keys, out)
        self._counters.add_read(count, len(keys), self._codec.format.block_bytes, self._clock() - begin)
        return count

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self._put(keys, blocks, lent=False)

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """See `radixkv.tiers.tier.Borrower`."""
        self._put(keys, blocks, lent=True)

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """See `radixkv.tiers.tier.RecencyOrdered`."""
        self.table.mark_used(prefix)

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget one namespace, or everything.

        Afterwards nothing of it is found, not even after a restart; but if the disk hangs, it forgets only once it answers
        again, provided that this process still runs then. The bytes are overwritten in the background.
        """
        if self._writer is not None:
            self._writer.clear(namespace)

    def flush(self, timeout: float | None = None) -> bool:
        return self._writer is None or self._writer.flush(timeout)

    def close(self) -> None:
        self._store.close()

    def _put(self, keys: Sequence[BlockKey], blocks: BlockBytes, *, lent: bool) -> None:
        self._codec.check_rows(keys, blocks)
        if self._writer is not None:
            self._counters.add(dropped_blocks=self._writer.put(keys, blocks, lent=lent))

    def _find(self, keys: Sequence[BlockKey]) -> FoundBlocks:
        if self._reads.ready:
            try:
                return self._store.find(keys)
            except MediumErrors as error:
                self._failed(error)
        return FoundBlocks(None, [])

    def _get(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        found = self._find(keys)
        if found.files is None or not found.blocks:
            return 0
        slots = [entry.slot for _, entry in found.blocks]
        verdicts, error = self._reader.read(found.files, keys, slots, out)
        count = next((row for row, verdict in enumerate(verdicts) if verdict is not Verdict.RIGHT), len(verdicts))
        if error is not None:
            self._failed(error)
        elif count:
            self._reads.worked()
        self._counters.add(corrupt_blocks=self._store.note_verdicts(found, verdicts, count))
        return count

    def _failed(self, error: Exception) -> None:
        self._counters.add(errors=1)
        self._reads.failed(error)
