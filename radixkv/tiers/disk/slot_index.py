"""Which slot holds which block, in SQLite.

SQLite comes with Python. With 100,000 blocks, LMDB opened three times as fast (in 0.1 s), but took four times as long for a
transaction that survives a crash. Blocks are looked up in a dictionary either way.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from radixkv.tiers.disk.store_folder import identity_of, open_private

_NAME = "index.sqlite"
_BLOCKS = """
CREATE TABLE IF NOT EXISTS blocks(
    slot INTEGER PRIMARY KEY,
    digest BLOB NOT NULL UNIQUE,
    namespace BLOB NOT NULL,
    used REAL NOT NULL
)
"""
# A pin's group is in the column "family", the name that stores on disks have for it.
_PINS = """
CREATE TABLE IF NOT EXISTS pins(
    number INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    family BLOB NOT NULL,
    namespace BLOB NOT NULL,
    by_tenant INTEGER NOT NULL,
    expires_at REAL,
    tokens BLOB NOT NULL
)
"""
_UNSOUND_BLOCKS = """
SELECT 1 FROM blocks
WHERE typeof(slot) != 'integer' OR slot < 0
OR typeof(digest) != 'blob' OR typeof(namespace) != 'blob' OR typeof(used) != 'real'
LIMIT 1
"""
_BOUND_TIMES = "UPDATE blocks SET used = :now WHERE used > :now AND typeof(used) = 'real'"

# SQLite's codes where it cannot make a file beside the index: nothing may be written there, or the disk is full.
_NO_ROOM_CODES = (sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)

# What a damaged index, or a failing disk, may raise: SQLite's messages quote the file, and may fail to decode.
IndexErrors = (sqlite3.Error, UnicodeDecodeError)


class IndexedBlock(NamedTuple):
    """A row.

    Attributes:
        slot: where the block is.
        digest: see `radixkv.tiers.block_key.BlockKey`.
        namespace: likewise.
        used: when it was last put or read, in seconds since 1970.
    """

    slot: int
    digest: bytes
    namespace: bytes
    used: float


class IndexedPin(NamedTuple):
    """A row of the table of pins; see `radixkv.tiers.disk.stored_pins.StoredPin`. Its tokens may be encrypted."""

    name: str
    group: bytes
    namespace: bytes
    by_tenant: bool
    expires_at: float | None
    tokens: bytes


class SlotIndex:
    """The index of one store, written by one process and read by any number. One thread at a time may call it.

    After a kill, all that was committed is there. The write-ahead log is not synced with each transaction: after a power cut,
    the index may be older than the slots, which their records reveal.

    Args:
        folder: where the file is.
        writable: False: only `find`, `all` and `__len__` may be called.

    Raises:
        OSError: the file cannot be made.
        sqlite3.Error, UnicodeDecodeError: it cannot be opened, or is damaged.
    """

    def __init__(self, folder: Path, *, writable: bool) -> None:
        self._path = folder / _NAME
        self._log_path = folder / f"{_NAME}-wal"
        for path in (self._path, folder / f"{_NAME}-journal"):
            if path.is_fifo():  # SQLite would block
                raise sqlite3.DatabaseError(f"a FIFO is in the place of {path.name}")
        if writable:
            with open(self._path, "ab", opener=open_private):  # SQLite gives its other files the mode of this one
                pass
        # An earlier process may have deleted something without truncating the log.
        self._log_has_deleted = writable
        self._identity = identity_of(self._path)
        self._ignores_log = False
        try:
            self._open(writable)
        except sqlite3.OperationalError as error:
            if writable or primary_code(error) not in _NO_ROOM_CODES or self._has_logged():
                raise
            # Where this process can write nothing, SQLite cannot make the files that it needs to see what others write.
            self._ignores_log = True
            self._open(writable)

    @property
    def is_current(self) -> bool:
        """Whether the open file is still the one in the folder, and what others write to it can be seen.

        Raises:
            OSError: the folder cannot be read.
        """
        is_same = identity_of(self._path) == self._identity
        return is_same and not (self._ignores_log and identity_of(self._log_path) is not None)

    def __len__(self) -> int:
        (count,) = self._database.execute("SELECT count(*) FROM blocks").fetchone()
        return int(count)

    def all(self) -> list[IndexedBlock]:
        """All blocks, least recently used first.

        Raises:
            sqlite3.Error, UnicodeDecodeError: they cannot be read, or make no sense.
        """
        if self._database.execute(_UNSOUND_BLOCKS).fetchone():
            raise sqlite3.DatabaseError("blocks with values of other types")
        rows = self._database.execute("SELECT slot, digest, namespace, used FROM blocks ORDER BY used, slot DESC")
        # Unlike `IndexedBlock._make`, this runs no Python code for each of many rows.
        return [*map(partial(tuple.__new__, IndexedBlock), rows.fetchall())]

    def find(self, digests: Sequence[bytes]) -> list[IndexedBlock]:
        """The leading blocks that are there.

        Raises:
            sqlite3.Error, UnicodeDecodeError: they cannot be read, or make no sense.
        """
        found = []
        for digest in digests:
            row = self._database.execute(
                "SELECT slot, digest, namespace, used FROM blocks WHERE digest = ?", (digest,)
            ).fetchone()
            if row is None:
                break
            if not isinstance(row[0], int) or row[0] < 0:
                raise sqlite3.DatabaseError(f"a block in slot {row[0]}")
            found.append(IndexedBlock._make(row))
        return found

    def commit(self, written: Iterable[IndexedBlock], used: Iterable[tuple[float, int]], gone: Iterable[int]) -> None:
        """Change the blocks, in one transaction.

        Args:
            written: blocks, which replace what their slots held.
            used: times at which slots were read.
            gone: slots that hold nothing any more.

        Raises:
            sqlite3.Error: nothing was changed.
        """
        with self._transaction():
            self._database.executemany("DELETE FROM blocks WHERE slot = ?", ((slot,) for slot in gone))
            self._database.executemany("UPDATE blocks SET used = ? WHERE slot = ?", used)
            self._database.executemany("REPLACE INTO blocks VALUES (?, ?, ?, ?)", written)

    def pins(self) -> list[IndexedPin]:
        """All pins, in the order in which they were written."""
        rows = self._database.execute(
            "SELECT name, family, namespace, by_tenant, expires_at, tokens FROM pins ORDER BY number"
        )
        return [*map(IndexedPin._make, rows.fetchall())]

    def change_pins(self, cleared: Iterable[bytes | None], gone: Iterable[str], written: Iterable[IndexedPin]) -> None:
        """Change the pins, in one transaction.

        Args:
            cleared: groups of namespaces all of whose pins are forgotten; a None among them: all pins are.
            gone: names of other pins to forget.
            written: pins to add after that.

        Raises:
            sqlite3.Error: nothing was changed.
        """
        cleared, gone = list(cleared), list(gone)
        self._log_has_deleted |= bool(cleared or gone)
        with self._transaction():
            for group in cleared:
                self._clear("pins", "family", group)
            self._database.executemany("DELETE FROM pins WHERE name = ?", ((name,) for name in gone))
            self._database.executemany(
                "REPLACE INTO pins(name, family, namespace, by_tenant, expires_at, tokens) VALUES (?, ?, ?, ?, ?, ?)",
                written,
            )

    def clear(self, namespace: bytes | None) -> None:
        """Forget the blocks of one namespace, or all.

        Raises:
            sqlite3.Error: nothing was changed.
        """
        with self._transaction():
            self._clear("blocks", "namespace", namespace)

    def erase_deleted(self) -> None:
        """Remove every trace of deleted pins from the files: SQLite's log keeps what was written until it is overwritten.

        While another process is reading, the log stays, and the next call tries again.

        Raises:
            sqlite3.Error: the log stays.
        """
        if self._log_has_deleted:
            busy, _, _ = self._database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
            self._log_has_deleted = bool(busy)

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove a damaged index; the blocks in the slots are lost."""
        for ending in ("", "-journal", "-wal", "-shm"):
            (folder / f"{_NAME}{ending}").unlink(missing_ok=True)

    def _open(self, writable: bool) -> None:
        mode = "rw" if writable else "ro&immutable=1" if self._ignores_log else "ro"
        self._database = sqlite3.connect(
            f"{self._path.absolute().as_uri()}?mode={mode}",
            uri=True,
            isolation_level=None,
            check_same_thread=False,
            timeout=5,
        )
        try:
            if writable:
                self._database.execute("PRAGMA journal_mode=WAL")
                self._database.execute("PRAGMA synchronous=NORMAL")
                self._database.execute("PRAGMA secure_delete=ON")  # what tenants had pinned is overwritten
                self._database.execute(_BLOCKS)
                self._database.execute(_PINS)
                # Unlike `quick_check`, it compares tables with their indexes.
                (verdict,) = self._database.execute("PRAGMA integrity_check(1)").fetchone()
                if verdict != "ok":
                    raise sqlite3.DatabaseError(verdict.replace("\n", " "))
                # The clock was set back: blocks used before that would stay the most recently used ones.
                self._database.execute(_BOUND_TIMES, {"now": time.time()})
                # A full disk may have no room for more of a log that a killed process left.
                self.erase_deleted()
            self._database.execute("SELECT slot, digest, namespace, used FROM blocks LIMIT 1").fetchall()
        except IndexErrors:
            self._database.close()
            raise

    def _has_logged(self) -> bool:
        """Whether some of the index is in its log alone. The attempt to open it may have made an empty log."""
        try:
            return self._log_path.stat().st_size > 0
        except FileNotFoundError:
            return False

    def _clear(self, table: str, column: str, value: bytes | None) -> None:
        if value is None:
            self._database.execute(f"DELETE FROM {table}")
        else:
            self._database.execute(f"DELETE FROM {table} WHERE {column} = ?", (value,))

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._database.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._database.execute("COMMIT")
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise


def primary_code(error: Exception) -> int | None:
    """SQLite's primary code of an error, without the extended bits; None: it has none."""
    code: int | None = getattr(error, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF
