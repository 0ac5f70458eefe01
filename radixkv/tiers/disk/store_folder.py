"""The folder of one store of blocks: its files, its lock, and permissions for its user alone.

::

    ROOT/                       what the user names
      <format>[-<key>]/         one store, 0700; one for each model, dtype, block size, quantisation and key
        format.json             what its name stands for
        lock                    held by the process that writes, which its text names
        index.sqlite            which slot holds which block, and what is pinned
        blocks-00000 ...        slots
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from radixkv.errors import StoreInUseError
from radixkv.tiers.block_format import FORMAT_VERSION, BlockFormat
from radixkv.tiers.record import RecordCodec

_HEADER = "format.json"
# For taking a lock.
_ATTEMPTS = 10
_SECONDS_BETWEEN_ATTEMPTS = 0.01


@dataclass(frozen=True, slots=True)
class StoreHeader:
    """What ``format.json`` says.

    Attributes:
        version: of the layout; see `radixkv.tiers.block_format.FORMAT_VERSION`.
        block_format: of the blocks.
        sealed: whether they are encrypted.
    """

    version: int
    block_format: BlockFormat
    sealed: bool

    @property
    def readable(self) -> bool:
        """Whether this version of RadixKV reads it."""
        return self.version == FORMAT_VERSION


def make_store_folder(root: Path, codec: RecordCodec) -> Path:
    """The folder of one format's store under ``root``; it is made if it is not there, and a damaged header is made anew.

    Raises:
        OSError: it cannot be made or read.
    """
    folder = root / codec.name
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_mode & 0o077:
        folder.chmod(0o700)
    if not _has_header(folder, codec):
        header = folder / _HEADER
        block_format = codec.format
        fields = {
            "version": FORMAT_VERSION,
            "model": block_format.model,
            "dtype": block_format.dtype,
            "block_size": block_format.block_size,
            "block_bytes": block_format.block_bytes,
            "fingerprint": block_format.fingerprint.hex(),
            "encrypted": codec.sealed,
        }
        draft = folder / f"{_HEADER}.{uuid.uuid4().hex}"  # process ids differ only within one container
        try:
            with open(draft, "w", opener=open_private) as file:
                json.dump(fields, file, indent=2)
            sync(draft)
            draft.rename(header)
        finally:
            draft.unlink(missing_ok=True)
        sync(folder)
    return folder


def read_header(folder: Path) -> StoreHeader:
    """The header of a store's folder.

    Raises:
        OSError: it cannot be read.
        ValueError: it makes no sense.
    """
    try:
        with open(folder / _HEADER, opener=open_private) as file:
            fields: dict[str, Any] = json.load(file)
        block_format = BlockFormat(
            bytes.fromhex(fields["fingerprint"]),
            int(fields["block_size"]),
            int(fields["block_bytes"]),
            str(fields["dtype"]),
            str(fields["model"]),
        )
        return StoreHeader(int(fields["version"]), block_format, bool(fields["encrypted"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{folder / _HEADER}: this is not the header of a store of blocks ({error!r})") from error


def remove_header(folder: Path) -> None:
    """Without it, a folder is no store until `make_store_folder` makes it one again."""
    (folder / _HEADER).unlink(missing_ok=True)


def _has_header(folder: Path, codec: RecordCodec) -> bool:
    """Whether a header is there that describes the records; the name of the model may be another one of the same."""
    try:
        header = read_header(folder)
    except (FileNotFoundError, ValueError):
        return False
    block_format = replace(codec.format, model=header.block_format.model)
    return header == StoreHeader(FORMAT_VERSION, block_format, codec.sealed)


def store_folders(root: Path) -> Iterator[Path]:
    """All stores under a root, or the root itself if it is one.

    Raises:
        OSError: the root cannot be read.
    """
    if identity_of(root / _HEADER) is not None:
        yield root
        return
    yield from sorted(folder for folder in root.iterdir() if identity_of(folder / _HEADER) is not None)


def identity_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of what a path leads to; None: there is nothing.

    Raises:
        OSError: the medium fails. `Path.exists` says then, from Python 3.14 on, that there is nothing.
    """
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    return status.st_dev, status.st_ino


def open_private(path: str | os.PathLike[str], flags: int) -> int:
    """An opener for `open`: a new file is its owner's alone, whatever the umask; a FIFO in its place does not block."""
    return os.open(path, flags | os.O_NONBLOCK, 0o600)


def sync(path: Path) -> None:
    """Have a file's bytes, or a folder's names, survive a power cut.

    Raises:
        OSError: they may not.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class FolderLock:
    """Held by the one process that writes to a store until that process ends, however it ends. A forked child does not.

    Args:
        folder: of the store.

    Raises:
        OSError: the file cannot be made.
        StoreInUseError: another process, or another tier of this one, holds it.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / "lock"
        self._file = open(self._path, "a+", opener=open_private)  # noqa: SIM115 - closed by `close`
        _locks.add(self)
        try:
            self._take()
        except BlockingIOError:
            self._file.seek(0)
            owner = self._file.read().strip() or "another process"
            self._file.close()
            raise StoreInUseError(
                f"{folder} is written by {owner}, and only one may: others take another disk_cache, or read this one with "
                "disk_cache_read_only"
            ) from None
        except OSError:
            self._file.close()
            raise
        self._file.truncate(0)
        self._file.write(f"process {os.getpid()} on {socket.gethostname()}")
        self._file.flush()
        status = os.fstat(self._file.fileno())
        self._identity = status.st_dev, status.st_ino

    @property
    def is_current(self) -> bool:
        """Whether the file is still the one in the folder: if it was removed, another process may hold a new one.

        Raises:
            OSError: the folder cannot be read.
        """
        return identity_of(self._path) == self._identity

    def _take(self) -> None:
        """Take the lock, in several attempts: `owner_of` also holds it for a moment."""
        for attempt in range(_ATTEMPTS, 0, -1):
            try:
                return fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if attempt == 1:
                    raise
            time.sleep(_SECONDS_BETWEEN_ATTEMPTS)

    def close(self) -> None:
        """Release it."""
        self._file.close()


# Global, because `os.register_at_fork` takes a function that is given no object.
_locks: WeakSet[FolderLock] = WeakSet()


def _close_in_child() -> None:
    """Close a forked child's descriptors, which would hold the locks beyond their owner's end; the owner keeps them."""
    for lock in _locks:
        lock.close()


os.register_at_fork(after_in_child=_close_in_child)


def owner_of(folder: Path) -> str | None:
    """Which process writes to a store now; None: none does, or it is not known."""
    try:
        with open(folder / "lock", opener=open_private) as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip()
    except OSError:
        return None
    return None
