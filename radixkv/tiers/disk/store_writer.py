"""A store of blocks in the one process that writes it: its state, and the threads that write and clear."""

from __future__ import annotations

import errno
import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path

from radixkv.errors import StoreInUseError
from radixkv.threads import Worker
from radixkv.tiers.backoff import Backoff, warn_of_uncleared
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.mount import Mount
from radixkv.tiers.disk.namespace_secret import keep_secret
from radixkv.tiers.disk.open_store import FoundBlocks, MediumErrors, OpenStore, open_to_write
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedBlock, primary_code
from radixkv.tiers.disk.slot_table import SlotTable
from radixkv.tiers.disk.stored_pins import StoredPins
from radixkv.tiers.medium_queue import MediumQueue, PendingBlock
from radixkv.tiers.record import RecordCodec, Verdict
from radixkv.tiers.stats import StoreCounters
from radixkv.tiers.tier import BlockBytes

_log = logging.getLogger(__name__)

# How long a caller of `StoreWriter.clear` waits for the index.
_CLEAR_SECONDS = 2.0


class StoreWriter:
    """Writes and finds blocks of one store. Any thread may call. Errors of the disk are counted and logged, not raised.

    After an error, the disk may be gone, and come back as another one or in an older state. So the store is opened anew, and
    read as far as it can be until then.

    Args:
        root: the folder of stores.
        codec: of the records.
        capacity: slots at most.
        queue_bytes: of blocks that may wait to be written.
        counters: count what happens.
        secret: see `radixkv.tiers.disk_tier.DiskTier`.
        clock: seconds.

    Attributes:
        pins: those in the store.
        table: of its blocks.

    Raises:
        StoreInUseError: another process writes to it.
    """

    def __init__(
        self,
        root: Path,
        codec: RecordCodec,
        *,
        capacity: int,
        queue_bytes: int,
        counters: StoreCounters,
        secret: bytes | None,
        clock: Callable[[], float],
    ) -> None:
        self._root = root
        self._secret = secret
        self._codec = codec
        self._capacity = capacity
        self._counters = counters
        self._clock = clock
        self._writes = Backoff(f"writing {root}", clock)
        self._growth = Backoff(f"taking more space for {root}", clock)
        self._closed = False
        self.table = SlotTable()
        self.pins = StoredPins(codec, self._tidy_soon)
        # Held during transactions of the index, even while the disk hangs in one.
        self._index_lock = threading.Lock()
        self._clear_lock = threading.Lock()  # guards clearing in memory; never held while waiting for the disk
        # Namespaces that the index must forget before anything else in it changes.
        self._uncleared: frozenset[bytes | None] = frozenset()
        self._will_tidy_again = False  # whether a job for it is queued: the writer's thread may hang
        # The writer's thread's own: free slots; those whose rows in the index may be out of date; and those to be overwritten
        # once they are free, since they hold what was cleared, of a batch that failed, or a record that proved wrong.
        self._free: list[int] = []
        self._stale: set[int] = set()
        self._unwiped: set[int] = set()
        self._opened: OpenStore | None = None
        self._files: SlotFiles | None = None  # of the store that is open, or was until its disk failed
        self._mount = Mount(root / codec.name)
        try:
            self._open()
        except MediumErrors as error:
            self._failed(self._writes, error)
        self._writer = MediumQueue("disk-tier", codec.format.block_bytes, queue_bytes, self._write)
        self._clearer = Worker("disk-tier-clearer")

    def __len__(self) -> int:
        return len(self.table)

    def find(self, keys: Sequence[BlockKey]) -> FoundBlocks:
        """The leading blocks that are there. If the disk could not clear something, it is tried again, as with each batch."""
        if self._uncleared or self.pins.has_unwritten:
            self._tidy_again()
        files = self._files
        return FoundBlocks(files, [] if files is None else self.table.find(keys))

    def note_verdicts(self, found: FoundBlocks, verdicts: Sequence[Verdict | None], count: int) -> int:
        """See `SlotTable.note_verdicts`."""
        return self.table.note_verdicts(found.blocks, verdicts, count)

    def put(self, keys: Sequence[BlockKey], blocks: BlockBytes, *, lent: bool) -> int:
        """Queue the blocks that are not there; returns how many were dropped. See `MediumQueue.put`."""
        self.table.mark_used(keys)  # what is there must not be evicted for the rest of its prefix
        return self._writer.put(keys, blocks, self.table.missing(keys), lent=lent)

    def clear(self, namespace: bytes | None) -> None:
        """See `radixkv.tiers.disk_tier.DiskTier.clear`."""
        if self._closed:
            return
        with self._clear_lock:
            self._forget(namespace)
        done = threading.Event()
        self._clearer.submit(partial(self._clear, done))
        if not done.wait(_CLEAR_SECONDS):
            _log.warning(
                "%s: the disk does not answer, and a restart before it does would find what was cleared", self._root
            )

    def flush(self, timeout: float | None) -> bool:
        """See `MediumQueue.flush`."""
        return self._writer.flush(timeout)

    def close(self) -> None:
        """Write what is queued, and close the store."""
        self._writer.close()
        self._closed = True
        self._clearer.stop(0.0)
        try:
            if self._opened is not None or self._uncleared or self._unwiped or self.pins.has_unwritten:
                opened = self._current()
                with self._index_lock:
                    self._clear_index(opened)
                    self._commit(opened, [])
                    self.pins.commit(opened.index)
        except (*MediumErrors, StoreInUseError) as error:
            self._failed(self._writes, error)
        if self._uncleared:
            warn_of_uncleared(self._root)
        self._give_up()
        self._files = None

    # Opening

    def _open(self) -> OpenStore:
        with self._index_lock:
            cleared = self._uncleared
            self._mount.check()
            if self._secret is not None:
                keep_secret(self._root, self._secret)
            opened = open_to_write(self._root, self._codec, self._capacity, cleared, self._stale)
            try:
                self._mount.check()  # now it is there
                self.pins.load(opened.pins)
            except BaseException:
                opened.store.close()
                raise
            with self._clear_lock:
                self._files = opened.store.files
                self.table.fill(opened.entries)
                self._opened, self._free = opened.store, opened.free
                if cleared:  # what this store had of that may be in any of them
                    self._unwiped.update(opened.free)
                self._stale.clear()
                self._uncleared -= cleared
                for namespace in self._uncleared:  # cleared meanwhile; pins and blocks put since then are newer
                    self.table.clear(namespace)
        return opened.store

    def _give_up(self) -> None:
        """Close the store, so that nothing keeps the failed disk in use; the next batch opens it anew."""
        with self._index_lock:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
                self._unwiped.update(self.table.take_freed())

    # Clearing

    def _forget(self, namespace: bytes | None) -> None:
        """Forget a namespace in memory. The caller holds `_clear_lock`."""
        self._uncleared |= {namespace}
        self.table.clear(namespace)
        self.pins.clear(namespace)
        self._writer.cancel(namespace, self._wipe_all if namespace is None else self._tidy)

    def _clear(self, done: threading.Event) -> None:
        """Have the index forget what is cleared, however much waits to be written or overwritten."""
        try:
            with self._index_lock:
                opened = self._opened
                if opened is None or not opened.is_current:
                    # What is in the store's place is opened, and cleared, by the job that `_forget` has queued.
                    self._writer.call(done.set)
                    return
                self._clear_index(opened)
                self.pins.commit(opened.index)
        except MediumErrors as error:
            self._failed(self._writes, error)
        done.set()

    def _clear_index(self, opened: OpenStore) -> None:
        """Have the index forget what is cleared. The caller holds `_index_lock`.

        Raises:
            OSError: another folder or lock is in place of that which was opened. What is cleared is to be forgotten there.
        """
        if not opened.is_current:
            raise OSError(errno.ESTALE, "another folder or lock is in place of that which was opened", str(self._root))
        for namespace in self._uncleared:
            opened.index.clear(namespace)
            with self._clear_lock:
                self._uncleared -= {namespace}

    # In the writer's thread

    def _write(self, batch: list[PendingBlock]) -> None:
        begin = self._clock()
        written = 0
        try:
            if self._writes.ready:
                written = self._write_slots(batch)
                for pending in batch:  # of a call that had no room for its last block, too
                    self.table.mark_used(pending.prefix)
                if written:  # else nothing is proved
                    self._writes.worked()
                    self._tidy()  # what could not be done before
        except (*MediumErrors, StoreInUseError) as error:
            self._failed(self._writes, error)
            if _may_be_gone(error):
                self._give_up()
        finally:
            with self._clear_lock:
                lost = self.table.missing([pending.key for pending in batch if not pending.cancelled])
            self._counters.add(
                written_blocks=written,
                written_bytes=written * self._codec.format.block_bytes,
                dropped_blocks=len(lost),
                write_seconds=self._clock() - begin,
            )

    def _write_slots(self, batch: list[PendingBlock]) -> int:
        opened = self._current()
        # Some may be there by now: a call that put them again may have looked just before they were written.
        missing = self.table.missing([pending.key for pending in batch])
        batch = [batch[row] for row in missing if not batch[row].cancelled]
        fitting, slots = self._allocate(opened, [pending.key for pending in batch])
        placed = list(zip([batch[row] for row in fitting], slots, strict=True))
        try:
            for part in opened.files.runs(slots):
                buffers: list[bytes | memoryview] = []
                for pending, _ in placed[part.start : part.stop]:
                    header, body = self._codec.encode(pending.key, pending.block.data)
                    buffers += [header.ljust(opened.files.slot_bytes - len(body), b"\0"), body]
                opened.files.write(slots[part.start], buffers)
            with self._index_lock:
                # What is cleared from here on is deleted again by the thread that clears, once this lock is free.
                self._clear_index(opened)
                now = time.time()
                blocks = {p: IndexedBlock(slot, p.key.digest, p.key.namespace, now) for p, slot in placed}
                self._commit(opened, [block for pending, block in blocks.items() if not pending.cancelled])
                with self._clear_lock:
                    kept = [pending for pending in blocks if not pending.cancelled]
                    self.table.add([pending.key for pending in kept], [blocks[pending] for pending in kept])
        except BaseException:
            self._discard(slots)
            raise
        self._discard({*slots} - {blocks[pending].slot for pending in kept})
        return len(kept)

    def _current(self) -> OpenStore:
        """The open store. It is opened anew if it was given up, or another folder, or another lock, is in its place."""
        if self._opened is not None and not self._opened.is_current:
            self._give_up()
        opened = self._open() if self._opened is None else self._opened
        self._discard(self.table.take_freed())
        self._wipe(opened)
        return opened

    def _commit(self, opened: OpenStore, blocks: Sequence[IndexedBlock]) -> None:
        """Write blocks and what else has changed into the index, after `_clear_index`. The caller holds `_index_lock`."""
        opened.index.commit(blocks, self.table.take_used(), self._stale)
        self._stale.clear()

    def _tidy_soon(self) -> None:
        self._writer.call(self._tidy)

    def _tidy_again(self) -> None:
        """Have the writer's thread do what the disk refused, once it may be tried again."""
        with self._clear_lock:
            if self._will_tidy_again or not self._writes.ready:
                return
            self._will_tidy_again = True
        self._tidy_soon()

    def _tidy(self) -> None:
        """Do what needs no block to write: clear, overwrite, and change pins."""
        self._will_tidy_again = False
        if self._opened is None and not self._writes.ready:
            return
        try:
            opened = self._current()
            with self._index_lock:
                self._clear_index(opened)
                self.pins.commit(opened.index)
                opened.index.erase_deleted()
            if not self._unwiped:  # else a slot could not be written
                self._writes.worked()
        except (*MediumErrors, StoreInUseError) as error:
            self._failed(self._writes, error)

    def _allocate(self, opened: OpenStore, keys: Sequence[BlockKey]) -> tuple[list[int], list[int]]:
        """Slots for blocks: free ones, then new ones, then those used longest ago.

        Returns:
            The indices of the blocks that get one, and their slots, both in ascending order.
        """
        count = len(keys)
        while len(self._free) < count and opened.files.num_slots < self._capacity and self._growth.ready:
            first = opened.files.num_slots
            try:
                opened.files.grow(self._capacity)
            except OSError as error:
                self._failed(self._growth, error)  # the slots that are there can still be used
                break
            self._growth.worked()
            self._free += range(first, opened.files.num_slots)
        self._free.sort(reverse=True)
        slots = [self._free.pop() for _ in range(min(count, len(self._free)))]
        fitting, evicted = self.table.make_room(keys, len(slots))
        self._counters.add(evicted_blocks=len(evicted))
        return fitting, sorted(slots + evicted)

    def _discard(self, slots: Collection[int]) -> None:
        """Free slots, whose contents no look-up may find any more."""
        self._free += slots
        self._stale.update(slots)
        self._unwiped.update(slots)

    def _wipe(self, opened: OpenStore) -> None:
        """Overwrite slots, unless they have new blocks by now; or give all space back, if no block is left."""
        if not self._unwiped:
            return
        try:
            if not len(self.table):
                self._free.clear()
                opened.files.shrink(0)
            else:
                zeros = bytes(opened.files.slot_bytes)
                for slot in self._unwiped.intersection(self._free):
                    opened.files.write(slot, [zeros])
                opened.files.shrink(opened.files.num_slots)  # space that could not be given back before
        except OSError as error:
            self._failed(self._writes, error)
        else:
            self._unwiped.clear()

    def _wipe_all(self) -> None:
        """`_tidy` after everything was cleared: free slots, too, may hold what an earlier process did not overwrite."""
        if self._files is not None:
            self._unwiped.update(range(self._files.num_slots))
        self._tidy()

    def _failed(self, backoff: Backoff, error: Exception) -> None:
        self._counters.add(errors=1)
        backoff.failed(error)


def _may_be_gone(error: Exception) -> bool:
    """Whether an error may mean that the disk is gone: not if it is full, or another process is using its index."""
    if isinstance(error, OSError):
        return error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return primary_code(error) not in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_BUSY)
