"""Blocks on a disk of this machine, which are there again after a restart."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from radixkv.cache.arguments import check_count, check_path
from radixkv.errors import StoreInUseError
from radixkv.tiers.background_writer import BackgroundWriter, PendingBlock
from radixkv.tiers.backoff import Backoff
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.open_store import OpenStore, open_to_read, open_to_write
from radixkv.tiers.record import RecordCodec, Verdict
from radixkv.tiers.slot_index import IndexedBlock
from radixkv.tiers.slot_reader import RecordsReader, SlotReader, runs_of
from radixkv.tiers.slot_table import SlotTable
from radixkv.tiers.stats import StoreCounters, StoreStats
from radixkv.tiers.stored_pins import StoredPins
from radixkv.tiers.tier import BlockBytes
from radixkv.tiers.worker import Worker

_log = logging.getLogger(__name__)

# How long a caller of `DiskTier.clear` waits for the index.
_CLEAR_SECONDS = 2.0
# What a disk does when it fails.
MediumErrors = (OSError, sqlite3.Error)


class DiskTier:
    """A tier in a folder of one disk; see `radixkv.tiers.store_folder` for what is in it.

    The index is read into memory when it is opened, blocks only when they are asked for. A thread writes. Blocks that were
    neither put nor read for the longest time make room for others; of a prefix, the last ones first.

    Args:
        root: the folder, made if it is not there. Stores of several formats may be in it.
        block_format: of the blocks.
        capacity_bytes: of the slots, at least one; rounded down to whole ones.
        queue_bytes: of blocks that may wait to be written; what is more is dropped.
        key: encrypts the blocks, 32 bytes; None: they are stored as they are.
        read_only: read what another process writes. Nothing is put, cleared or forgotten.
        read_records: see `radixkv.tiers.slot_reader.SlotReader`.
        clock: seconds, for statistics and for the time after which a disk that failed is tried again.

    Attributes:
        medium: "disk".
        pins: that this store remembers.
        table: of its blocks; of a store that is only read, it is empty.

    Raises:
        ImportError: a key is given, and cryptography is not installed.
        StoreInUseError: another process writes to it. A disk that fails raises nothing.
        TypeError, ValueError: an argument has no meaning.
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
        read_only: bool = False,
        read_records: RecordsReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_path("root", root)
        check_count("queue_bytes", queue_bytes, 1)
        self._codec = RecordCodec(block_format, key)
        self._reader = SlotReader(self._codec, read_records)
        self._slot_bytes = self._reader.slot_bytes
        check_count("capacity_bytes", capacity_bytes, self._slot_bytes)
        self._capacity = capacity_bytes // self._slot_bytes
        self._root = root
        self._read_only = read_only
        self._clock = clock
        self._counters = StoreCounters()
        self._reads = Backoff(f"reading {root}", clock)
        self._writes = Backoff(f"writing {root}", clock)
        self._growth = Backoff(f"taking more space for {root}", clock)
        self.table = SlotTable()
        self._lock = threading.Condition()  # of what follows
        self._num_reading = 0
        self._closed = False
        # Held around transactions of the index, and as long as the disk hangs in one.
        self._index_lock = threading.Lock()
        self._clear_lock = threading.Lock()  # of what is cleared in memory; never held while the disk is waited for
        # Namespaces that the index is yet to forget, before anything else changes in it.
        self._uncleared: frozenset[bytes | None] = frozenset()
        self._stale: set[int] = set()  # slots of which the index may say what is no longer so
        self._free: list[int] = []  # the writer's own
        self._opened: OpenStore | None = None
        self.pins = StoredPins(self._codec, self._write_pins_soon)
        try:
            self._opened = self._open()
        except MediumErrors as error:
            self._failed(self._reads if read_only else self._writes, error)
        self._writer = (
            None if read_only else BackgroundWriter("disk-tier", block_format.block_bytes, queue_bytes, self._write)
        )
        self._clearer = None if read_only else Worker("disk-tier-clearer")

    @property
    def stats(self) -> StoreStats:
        return self._counters.read()

    def __len__(self) -> int:
        """How many blocks there are; of a store that is only read, at some time."""
        opened = self._opened
        if not self._read_only:
            return len(self.table)
        with self._index_lock:
            return len(opened.index) if opened else 0

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        with self._reading() as opened:
            return 0 if opened is None else len(self._find(opened, keys))

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        self._codec.check_rows(keys, out)
        begin = self._clock()
        count = 0
        with self._reading() as opened:
            if opened is not None:
                count = self._get(opened, keys, out)
        self._counters.add_read(count, len(keys), self._codec.format.block_bytes, self._clock() - begin)
        return count

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self._put(keys, blocks, lent=False)

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """See `radixkv.tiers.tier.Borrower`."""
        self._put(keys, blocks, lent=True)

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """See `radixkv.tiers.tier.RecencyOrdered`."""
        if not self._read_only:
            self.table.mark_used(prefix)

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget one namespace, or everything.

        Afterwards nothing of it is found, after a restart neither; but where the disk hangs, what it has is forgotten when
        it answers again, if this process lives so long. Its bytes are overwritten in the background.
        """
        if self._clearer is None or self._closed:
            return
        with self._clear_lock:
            self._forget(namespace)
        done = threading.Event()
        self._clearer.submit(partial(self._clear, done))
        if not done.wait(_CLEAR_SECONDS):
            _log.warning(
                "%s: the disk does not answer, and a restart before it does would find what was cleared", self._root
            )

    def flush(self, timeout: float | None = None) -> bool:
        return self._writer is None or self._writer.flush(timeout)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
        with self._lock:
            self._closed = True
            self._lock.wait_for(lambda: not self._num_reading)
        if self._clearer is not None:
            self._clearer.stop(0.0)
        with self._index_lock:
            if self._opened is not None:
                if not self._read_only:
                    try:
                        self._commit(self._opened, [])
                        self.pins.commit(self._opened.index)
                    except MediumErrors as error:
                        self._failed(self._writes, error)
                self._opened.close()
                self._opened = None

    # Opening

    def _open(self) -> OpenStore:
        if self._read_only:
            return open_to_read(self._root, self._codec, self._slot_bytes)
        cleared = self._uncleared
        opened, entries, self._free = open_to_write(
            self._root, self._codec, self._slot_bytes, self._capacity, cleared, self.pins
        )
        with self._clear_lock:
            self.table.fill(entries)
            self._uncleared -= cleared
            for namespace in self._uncleared:  # what was cleared meanwhile
                self._forget(namespace)
        return opened

    # Reading

    @contextmanager
    def _reading(self) -> Iterator[OpenStore | None]:
        """What can be read now, and is not closed meanwhile."""
        with self._lock:
            reading = not self._closed
            self._num_reading += reading
        try:
            yield self._usable() if reading else None
        finally:
            with self._lock:
                self._num_reading -= reading
                self._lock.notify_all()

    def _usable(self) -> OpenStore | None:
        """What can be read now; a store that is only read is opened when it is there."""
        if not self._reads.ready:
            return None
        if self._opened is None and self._read_only:
            with self._index_lock:
                try:
                    self._opened = self._opened or self._open()
                except MediumErrors as error:
                    self._failed(self._reads, error)
        return self._opened

    def _find(self, opened: OpenStore, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, IndexedBlock]]:
        if self._read_only:
            try:
                with self._index_lock:
                    rows = opened.index.find([key.digest for key in keys])
            except MediumErrors as error:
                self._failed(self._reads, error)
                return []
            return list(zip(keys, rows, strict=False))
        return self.table.find(keys)

    def _get(self, opened: OpenStore, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        found = self._find(opened, keys)
        verdicts, errors = self._reader.read(opened.files, keys, [entry.slot for _, entry in found], out)
        for error in errors:
            self._failed(self._reads, error)
        count = next((row for row, verdict in enumerate(verdicts) if verdict is not Verdict.RIGHT), len(verdicts))
        if count:
            self._reads.worked()
        # To a reader, a block that its writer is overwriting is as corrupt as one that is torn.
        corrupt = verdicts.count(Verdict.CORRUPT) if self._read_only else self.table.settle(found, verdicts, count)
        self._counters.add(corrupt_blocks=corrupt)
        return count

    # Clearing

    def _forget(self, namespace: bytes | None) -> None:
        """In memory; with the lock of what is cleared."""
        if self._writer is not None:
            self._uncleared |= {namespace}
            slots = self.table.clear(namespace)
            self.pins.clear(namespace)
            self._writer.cancel(namespace, self._release_all if namespace is None else partial(self._erase, slots))

    def _clear(self, done: threading.Event) -> None:
        try:
            with self._index_lock:
                if self._opened is not None:
                    self._clear_index(self._opened)
                    self.pins.commit(self._opened.index)
        except MediumErrors as error:
            self._failed(self._writes, error)
        self._write_pins_soon()  # what was deleted is still in the index's log
        done.set()

    def _clear_index(self, opened: OpenStore) -> None:
        """With the index's lock."""
        for namespace in self._uncleared:
            opened.index.clear(namespace)
            with self._clear_lock:
                self._uncleared -= {namespace}

    # Writing

    def _put(self, keys: Sequence[BlockKey], blocks: BlockBytes, *, lent: bool) -> None:
        self._codec.check_rows(keys, blocks)
        if self._writer is None:
            return
        # What is there must not make room for the rest of its prefix.
        self.table.mark_used(keys)
        self._counters.add(dropped_blocks=self._writer.put(keys, blocks, self.table.missing(keys), lent=lent))

    # In the writer's thread

    def _write(self, batch: list[PendingBlock]) -> None:
        begin = self._clock()
        written = 0
        try:
            if self._writes.ready:
                written = self._write_slots(batch)
                self._writes.worked()
            self._write_pins()  # those that could not be written before
        except (*MediumErrors, StoreInUseError) as error:
            self._failed(self._writes, error)
        self._counters.add(
            written_blocks=written,
            written_bytes=written * self._codec.format.block_bytes,
            dropped_blocks=len(batch) - written,
            write_seconds=self._clock() - begin,
        )

    def _write_slots(self, batch: list[PendingBlock]) -> int:
        if self._opened is None:
            with self._index_lock:
                self._opened = self._open()
        opened = self._opened
        batch = [pending for pending in batch if not pending.cancelled]
        slots = self._allocate(opened, len(batch))
        placed = list(zip(batch, slots, strict=False))
        try:
            for part in runs_of(slots, opened.files.slots_per_file, self._reader.slots_per_call):
                buffers: list[bytes | memoryview] = []
                for pending, _ in placed[part.start : part.stop]:
                    header, body = self._codec.encode(pending.key, pending.block.data)
                    buffers += [header.ljust(self._slot_bytes - len(body), b"\0"), body]
                opened.files.write(slots[part.start], buffers)
            with self._index_lock:
                now = time.time()
                blocks = {p: IndexedBlock(slot, p.key.digest, p.key.namespace, now) for p, slot in placed}
                self._commit(opened, [block for pending, block in blocks.items() if not pending.cancelled])
                with self._clear_lock:
                    kept = [pending for pending in blocks if not pending.cancelled]
                    self.table.add([pending.key for pending in kept], [blocks[pending] for pending in kept])
            for pending in kept:
                self.table.mark_used(pending.prefix)
        except BaseException:
            self._free += slots
            raise
        written = {blocks[pending].slot for pending in kept}
        self._erase([slot for slot in slots if slot not in written])
        return len(kept)

    def _commit(self, opened: OpenStore, blocks: Sequence[IndexedBlock]) -> None:
        self._clear_index(opened)
        used, gone = self.table.take_changes()
        self._free += gone
        self._stale.update(gone)
        opened.index.commit(blocks, used, self._stale)
        self._stale.clear()

    def _write_pins_soon(self) -> None:
        if self._writer is not None:
            self._writer.call(self._write_pins)

    def _write_pins(self) -> None:
        if self._opened is None or not self._writes.ready:
            return
        try:
            with self._index_lock:
                self._clear_index(self._opened)
                self.pins.commit(self._opened.index)
                self._opened.index.erase_deleted()
        except MediumErrors as error:
            self._failed(self._writes, error)

    def _allocate(self, opened: OpenStore, count: int) -> list[int]:
        """So many slots in ascending order, or as many as there are in all: free ones, new ones, those used longest ago."""
        while len(self._free) < count and opened.files.num_slots < self._capacity and self._growth.ready:
            first = opened.files.num_slots
            try:
                opened.files.grow(self._capacity)
            except OSError as error:
                self._failed(self._growth, error)  # but what is there can be used
                break
            self._growth.worked()
            self._free += range(first, opened.files.num_slots)
        self._free.sort(reverse=True)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        evicted = self.table.evict(count - len(slots))
        self._counters.add(evicted_blocks=len(evicted))
        return sorted(slots + evicted)

    def _erase(self, slots: list[int]) -> None:
        opened = self._opened
        if opened is not None:
            zeros = bytes(self._slot_bytes)
            try:
                for slot in slots:
                    opened.files.write(slot, [zeros])
            except OSError as error:
                self._failed(self._writes, error)
        self._free += slots

    def _release_all(self) -> None:
        opened = self._opened
        if opened is None:
            return
        self.table.take_changes()
        self._free.clear()
        try:
            opened.files.shrink(0)
        except OSError as error:
            self._failed(self._writes, error)

    def _failed(self, backoff: Backoff, error: Exception) -> None:
        self._counters.add(errors=1)
        backoff.failed(error)
