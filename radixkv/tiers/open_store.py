"""A store of blocks on a disk while a process has it open: its lock, its index, and the files with its slots."""

from __future__ import annotations

import logging
import sqlite3
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from radixkv.tiers.record import RecordCodec
from radixkv.tiers.slot_files import SlotFiles
from radixkv.tiers.slot_index import IndexedBlock, SlotIndex
from radixkv.tiers.store_folder import FolderLock, make_store_folder
from radixkv.tiers.stored_pins import StoredPins

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OpenStore:
    """See `store_folder` for what is in the folder.

    Attributes:
        lock: of the process that writes; None: it only reads.
        index: which slot holds which block.
        files: with the slots.
    """

    lock: FolderLock | None
    index: SlotIndex
    files: SlotFiles

    def close(self) -> None:
        """Close what is open, which nothing may be reading."""
        self.files.close()
        self.index.close()
        if self.lock is not None:
            self.lock.close()


def open_to_read(root: Path, codec: RecordCodec, slot_bytes: int) -> OpenStore:
    """Open what another process writes.

    Args:
        root: the folder of stores.
        codec: of the records, which says which store it is.
        slot_bytes: of a slot.

    Raises:
        OSError, sqlite3.Error: it is not there, or the disk fails.
    """
    folder = root / codec.name
    with ExitStack() as opened:
        index = SlotIndex(folder, writable=False)
        opened.callback(index.close)
        files = SlotFiles(folder, slot_bytes, writable=False)
        opened.pop_all()
        return OpenStore(None, index, files)


def open_to_write(
    root: Path,
    codec: RecordCodec,
    slot_bytes: int,
    capacity: int,
    cleared: Iterable[bytes | None],
    pins: StoredPins,
) -> tuple[OpenStore, OrderedDict[bytes, IndexedBlock], list[int]]:
    """Open a store, made if it is not there, as the one process that writes it.

    Args:
        root: the folder of stores.
        codec: of the records, which says which store it is.
        slot_bytes: of a slot.
        capacity: slots; the space of those beyond is given back.
        cleared: namespaces that are to be forgotten, None: all.
        pins: are given those of the store.

    Returns:
        The store, its blocks by digest from the least to the most recently used, and its free slots.

    Raises:
        OSError, sqlite3.Error: the disk fails.
        StoreInUseError: another process writes to it.
    """
    with ExitStack() as opened:
        folder = make_store_folder(root, codec)
        lock = FolderLock(folder)
        opened.callback(lock.close)
        index = _open_index(folder)
        opened.callback(index.close)
        for namespace in cleared:
            index.clear(namespace)
        files = SlotFiles(folder, slot_bytes, writable=True)
        opened.callback(files.close)
        files.shrink(capacity)
        rows = index.all()
        index.commit([], [], [row.slot for row in rows if row.slot >= files.num_slots])
        entries = OrderedDict((row.digest, row) for row in rows if row.slot < files.num_slots)
        taken = {entry.slot for entry in entries.values()}
        free = [slot for slot in range(files.num_slots) if slot not in taken]
        pins.load(index)
        opened.pop_all()
        return OpenStore(lock, index, files), entries, free


def _open_index(folder: Path) -> SlotIndex:
    try:
        return SlotIndex(folder, writable=True)
    except sqlite3.OperationalError:
        raise  # the disk's, not the file's
    except sqlite3.DatabaseError as error:
        _log.warning("%s: the index is damaged (%s). Beginning with an empty one.", folder, error)
        SlotIndex.remove(folder)
        return SlotIndex(folder, writable=True)
