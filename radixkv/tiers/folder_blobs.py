"""Blobs as files of one folder, which several machines may mount.

Each file is written once, by one process, under a temporary name, and renamed when it is whole.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from radixkv.cache.arguments import check_count, check_path
from radixkv.threads import FutureThreads
from radixkv.tiers.disk.mount import Mount
from radixkv.tiers.disk.namespace_secret import keep_secret
from radixkv.tiers.disk.store_folder import identity_of
from radixkv.tiers.shared_tier import PartlyWrittenError

NUM_THREADS = 4
# A file whose time is further in the future was used when some machine's clock was ahead.
MAX_SECONDS_AHEAD = 3600
# How often the folder's size is checked while as much as its capacity is written.
LOOKS_PER_CAPACITY = 16


class _File(NamedTuple):
    """When a file was used last, its size, its folder and its name. There may be millions."""

    used: float
    size: int
    folder: str
    name: str

    @property
    def path(self) -> str:
        return f"{self.folder}/{self.name}"

    @property
    def blocks(self) -> tuple[str, str]:
        """Which block it holds, and behind which other one; see `BlobStore`."""
        block, _, before = self.name.partition("-")
        return block, before


class FolderBlobs:
    """A store of blobs (`radixkv.tiers.shared_tier.BlobStore`) in a folder.

    Args:
        root: the folder, made if it is not there.
        capacity_bytes: of all files in it. Each process that writes enforces it now and then, by removing the least recently
            used files, of a prefix the last ones first; in between, there may be more. Reading does not count as use:
            `mark_used` does.
        secret: of the names of namespaces, to be kept in ``root``. A root with another one is not written. None: it is kept
            elsewhere.

    Attributes:
        description: the folder.

    Raises:
        ValueError: the folder is not a `Path`, or the capacity not a number of bytes.
    """

    def __init__(self, root: Path, *, capacity_bytes: int, secret: bytes | None = None) -> None:
        check_path("root", root)
        check_count("capacity_bytes", capacity_bytes, 1)
        self.description = str(root)
        self._root = root / "files"  # a disk tier may have the same root
        self._secret = secret
        self._mount = Mount(self._root)
        with suppress(OSError):  # a folder that fails now may recover; until then, each use raises
            self._mount.check()
        self._capacity = capacity_bytes
        self._until_look = 0
        self._looked_at = time.time()
        # Blocks that were removed while their prefix was written, and what was before each: more may come behind them.
        self._removed: dict[str, str] = {}
        self._threads = FutureThreads("folder-blobs", NUM_THREADS)

    def count_present(self, names: Sequence[str]) -> int:
        return next((i for i, name in enumerate(names) if identity_of(self._path(name)) is None), len(names))

    def first_present(self, names: Sequence[str]) -> int | None:
        return next((i for i, name in enumerate(names) if identity_of(self._path(name)) is not None), None)

    def read(self, names: Sequence[str]) -> Sequence[bytes | None]:
        reads = [self._threads.submit(partial(self._read, name)) for name in names]
        return [read.result() for read in reads]

    def write(self, blobs: Mapping[str, bytes]) -> int:
        self._check_place()
        missing = [name for name in blobs if not self._in_use(name)]
        written = 0
        try:
            for name in missing:
                self._write_or_make_room(self._path(name), blobs[name])
                self._until_look -= len(blobs[name])
                written += 1
            if self._until_look < 0:
                self._cut_down_to(self._capacity)
                self._until_look = self._capacity // LOOKS_PER_CAPACITY
        except OSError as error:
            raise PartlyWrittenError(str(error), written, len(missing) - written) from error
        return written

    def mark_used(self, names: Sequence[str]) -> None:
        for name in reversed(names):
            self._in_use(name)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            path = self._path(name)
            try:
                path.unlink(missing_ok=True)
            except IsADirectoryError:
                shutil.rmtree(path)

    def clear(self, path: str) -> None:
        self._check_place()
        folder = self._root / path
        # A rename clears it for all readers at once, however long removing takes. Another process may help with that; what is
        # left is removed when the folder is cut down.
        doomed = self._root / f".cleared-{uuid.uuid4().hex}"
        try:
            os.replace(folder, doomed)
        except FileNotFoundError:
            return
        shutil.rmtree(doomed, ignore_errors=True)

    def close(self) -> None:
        self._threads.shutdown()

    def _check_place(self) -> None:
        """Before anything is changed: check that this is still the folder whose blocks have names of this secret.

        Raises:
            OSError: it is not, or its medium fails.
        """
        self._mount.check()
        if self._secret is not None:
            keep_secret(self._root.parent, self._secret)

    def _path(self, name: str) -> Path:
        folder, _, block = name.rpartition("/")
        return self._root / folder / block[:2] / block

    def _in_use(self, name: str) -> bool:
        """Whether a blob is there; if so, mark it as used, so that it is not removed for the rest of its prefix."""
        try:
            _touch(self._path(name))
        except FileNotFoundError:
            return False
        return True

    def _read(self, name: str) -> bytes | None:
        """A blob; None: there is none. What is there in place of a file reads as empty, so that the tier deletes it."""
        try:
            # A pipe would block until it is written to.
            file = os.open(self._path(name), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError:
            return None
        try:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return b""
            blob = bytearray(status.st_size)
            length = os.preadv(file, [memoryview(blob)], 0)
        finally:
            os.close(file)
        return bytes(memoryview(blob)[:length])

    def _write_or_make_room(self, path: Path, blob: bytes) -> None:
        try:
            self._write(path, blob)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            # A disk hardly larger than the capacity is filled by what is written between two looks, and a smaller one by what
            # is here.
            most, held = self._capacity, sum(file.size for file in self._files())
            if error.errno == errno.EDQUOT or 2 * held >= shutil.disk_usage(self._root).used:
                most = min(most, held)
            self._cut_down_to(most - most // LOOKS_PER_CAPACITY)
            self._write(path, blob)

    def _write(self, path: Path, blob: bytes) -> None:
        try:
            self._write_once(path, blob)
        except FileNotFoundError:  # another process cleared the namespace meanwhile, and its folder with it
            self._write_once(path, blob)

    def _write_once(self, path: Path, blob: bytes) -> None:
        self._make_folder(path.parent)
        draft = path.with_name(f".{uuid.uuid4().hex}")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if os.pwritev(file, [memoryview(blob)], 0) != len(blob):
                raise OSError(errno.ENOSPC, "not everything was written", str(draft))
            _touch(file)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(file)

    def _make_folder(self, path: Path) -> None:
        """Make a folder with those above it, the root included, all for this user alone."""
        if identity_of(path) is None:
            self._make_folder(path.parent)
            path.mkdir(mode=0o700, exist_ok=True)
            if path == self._root:
                self._mount.check()

    def _cut_down_to(self, num_bytes: int) -> None:
        """Remove the least recently used files beyond ``num_bytes`` in all, but none before what is behind it."""
        for unfinished in self._root.glob(".cleared-*"):  # by a process that was killed
            shutil.rmtree(unfinished, ignore_errors=True)
        looked_at, self._looked_at = self._looked_at, time.time()
        files = [*self._files()]
        excess = sum(file.size for file in files) - num_bytes
        if excess <= 0:
            return
        files.sort(reverse=True)
        before = self._removed | dict(file.blocks for file in files)
        # A block is used when the last of those behind it is, and makes room after them.
        uses = {"": (0.0, 0)}
        for file in files:
            block, num_behind = file.blocks[0], 0
            while block not in uses:
                uses[block] = file.used, num_behind
                block, num_behind = before.get(block, ""), num_behind + 1
        self._removed = {block: before[block] for block in self._removed if block in uses}
        files.sort(key=lambda file: uses[file.blocks[0]])
        for file in files:
            if excess <= 0:
                return
            Path(file.path).unlink(missing_ok=True)
            excess -= file.size
            if file.used >= looked_at:
                self._removed.update([file.blocks])

    def _files(self) -> Iterator[_File]:
        latest = time.time() + MAX_SECONDS_AHEAD
        for folder, _, names in os.walk(self._root):
            for name in names:
                path = f"{folder}/{name}"
                try:
                    status = os.stat(path)
                    if status.st_mtime > latest:  # until then, it would be the last to be removed
                        _touch(path)
                except FileNotFoundError:
                    continue  # another process removed it
                yield _File(status.st_mtime, status.st_size, folder, name)


def _touch(file: int | str | Path) -> None:
    """Mark a file as used now, to the nanosecond: a file system's own clock stands still for milliseconds."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))
