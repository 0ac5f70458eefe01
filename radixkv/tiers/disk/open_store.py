"""A store of blocks on a disk while a process has it open: its lock, its index, and the files with its slots."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.compaction import compact
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedBlock, IndexedPin, IndexErrors, SlotIndex, primary_code
from radixkv.tiers.disk.slot_reader import slot_bytes_of, verdict_on
from radixkv.tiers.disk.store_folder import FolderLock, make_store_folder
from radixkv.tiers.record import RecordCodec, Verdict

_log = logging.getLogger(__name__)

# SQLite's codes for a disk or lock that fails. Anything else counts as damage, which has many codes and sometimes none.
_DISK_CODES = frozenset(
    {
        sqlite3.SQLITE_PERM,
        sqlite3.SQLITE_BUSY,
        sqlite3.SQLITE_LOCKED,
        sqlite3.SQLITE_READONLY,
        sqlite3.SQLITE_IOERR,
        sqlite3.SQLITE_FULL,
        sqlite3.SQLITE_CANTOPEN,
        sqlite3.SQLITE_PROTOCOL,
        sqlite3.SQLITE_NOLFS,
    }
)

# SQLite's codes where a disk has no room for its log, or for the file that processes share beside it; and what both take at
# most before the log is begun anew.
_FULL_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR_SHMSIZE)
_INDEX_ROOM_BYTES = 5 << 20

# What a failing disk may raise.
MediumErrors = (OSError, *IndexErrors)


@dataclass(slots=True)
class OpenStore:
    """An open store; see `store_folder` for what is in its folder.

    Attributes:
        lock: of the process that writes; None: it only reads.
        index: which slot holds which block.
        files: with the slots.
    """

    lock: FolderLock | None
    index: SlotIndex
    files: SlotFiles

    @property
    def is_current(self) -> bool:
        """Whether this is still the store in the folder, and no other process may write to it if this one does.

        Raises:
            OSError: the folder cannot be read.
        """
        return self.index.is_current and (self.lock is None or self.lock.is_current)

    def close(self) -> None:
        """Release the store. Its slots can still be read, but no file stays open."""
        self.files.close()
        self.index.close()
        if self.lock is not None:
            self.lock.close()


class StoreAndContents(NamedTuple):
    """A store that this process writes, and what was in it.

    Attributes:
        store: the store.
        entries: its blocks by digest, least recently used first.
        free: its free slots.
        pins: its pins.
    """

    store: OpenStore
    entries: dict[bytes, IndexedBlock]
    free: list[int]
    pins: list[IndexedPin]


class FoundBlocks(NamedTuple):
    """Blocks of one prefix.

    Attributes:
        files: the files that they are in; None: no store is open.
        blocks: their keys, and where they are.
    """

    files: SlotFiles | None
    blocks: list[tuple[BlockKey, IndexedBlock]]


def open_to_read(root: Path, codec: RecordCodec) -> OpenStore:
    """Open what another process writes.

    Args:
        root: the folder of stores.
        codec: of the records; its name is that of the store.

    Raises:
        OSError, sqlite3.Error: the store is not there, or the disk fails.
    """
    folder = root / codec.name
    files = SlotFiles(folder, slot_bytes_of(codec), writable=False)  # holds nothing open yet
    return OpenStore(None, SlotIndex(folder, writable=False), files)


def open_to_write(
    root: Path, codec: RecordCodec, capacity: int, cleared: Collection[bytes | None], stale: Collection[int]
) -> StoreAndContents:
    """Open a store, made if it is not there, as the one process that writes it.

    Args:
        root: the folder of stores.
        codec: of the records; its name is that of the store.
        capacity: slots, at least 1; of more blocks, the most recently used ones are kept, and the other space is given back.
        cleared: namespaces to forget; a None among them: all.
        stale: slots that may hold other blocks than the index says: they are read, and free where they do.

    Raises:
        OSError, sqlite3.Error: the disk fails.
        StoreInUseError: another process writes to it.
    """
    with ExitStack() as opened:
        folder = make_store_folder(root, codec)
        lock = FolderLock(folder)
        opened.callback(lock.close)
        files = SlotFiles(folder, slot_bytes_of(codec), writable=True)
        opened.callback(files.close)
        try:
            index, rows, pins = _read_index(folder, files, codec, cleared, stale)
        except IndexErrors as error:
            if not _is_damage(error):
                raise
            _log.warning("%s: the index is damaged (%s). Beginning with an empty one.", folder, error)
            SlotIndex.remove(folder)
            index, rows, pins = _read_index(folder, files, codec, cleared, stale)
        opened.callback(index.close)
        if files.num_slots > capacity:
            rows = compact(index, files, rows, rows[-capacity:], capacity)
        entries = {row.digest: row for row in rows}
        taken = {entry.slot for entry in rows}
        free = [slot for slot in range(files.num_slots) if slot not in taken]
        opened.pop_all()
        return StoreAndContents(OpenStore(lock, index, files), entries, free, pins)


def index_to_write(folder: Path, files: SlotFiles) -> SlotIndex:
    """A store's index, opened to be written. On a full disk, it gets room that the last slots had.

    Raises:
        OSError, sqlite3.Error, UnicodeDecodeError: see `SlotIndex`.
    """
    try:
        return SlotIndex(folder, writable=True)
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", None) not in _FULL_CODES or not files.num_slots:
            raise
        files.shrink(max(0, files.num_slots - -(-_INDEX_ROOM_BYTES // files.slot_bytes)))
        return SlotIndex(folder, writable=True)


def _read_index(
    folder: Path, files: SlotFiles, codec: RecordCodec, cleared: Collection[bytes | None], stale: Collection[int]
) -> tuple[SlotIndex, list[IndexedBlock], list[IndexedPin]]:
    """The index, and all that is in it: damage shows only when it is read or written."""
    index = index_to_write(folder, files)
    try:
        for namespace in cleared:
            index.clear(namespace)
        rows = index.all()
        gone = {
            row.slot
            for row in rows
            if row.slot >= files.num_slots
            or (row.slot in stale and verdict_on(files, codec, row.slot, row.digest) is not Verdict.RIGHT)
        }
        index.commit([], [], gone)
        return index, [row for row in rows if row.slot not in gone], index.pins()
    except BaseException:
        index.close()
        raise


def _is_damage(error: Exception) -> bool:
    """Whether the file itself is damaged, rather than that its disk fails or another process is in the way."""
    # Without extended bits, this code means that the file's own header forbids writing.
    if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_READONLY:
        return True
    return primary_code(error) not in _DISK_CODES
