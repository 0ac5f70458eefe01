"""The secret of stored namespaces, without which it cannot be found out which tenant a block belongs to."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import secrets
import time
from pathlib import Path

from radixkv.text_files import read_hex
from radixkv.tiers.disk.store_folder import open_private, sync

_log = logging.getLogger(__name__)

_NAME = "namespaces.secret"
# In a disk's folder: a copy of the shared folder's secret.
_COPY_NAME = "shared-namespaces.secret"
_NUM_BYTES = 32
# What file systems say that have no hard links, such as FAT and many that are mounted from a network, or where a file has
# that name, perhaps an empty one.
_NO_LINK = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EEXIST)
# For reading what another process makes there at the same time.
_ATTEMPTS = 10
_SECONDS_BETWEEN_ATTEMPTS = 0.01


def is_server(store: str) -> bool:
    """Whether a shared store is a server; else it is a folder."""
    return "://" in store


def find_secret(
    secret_file: Path | None, disk_cache: Path | None, shared_cache: str | None, *, read_only: bool = False
) -> bytes | None:
    """The secret for the configured tiers; None: nothing outlives the process, so none is needed.

    Args:
        secret_file: a file of 64 hexadecimal digits.
        disk_cache: a folder.
        shared_cache: a folder or a server. A shared folder holds its own secret, since all machines need it; one without a
            secret gets the copy that ``disk_cache`` keeps for when the shared folder is gone, or else that folder's own.
        read_only: write nothing into ``disk_cache``.

    Raises:
        OSError: ``secret_file`` cannot be read.
        ValueError: the file holds something else; or no file is named although the shared store is a server, which has no
            place for a secret.
    """
    if secret_file is not None:
        return read_hex(secret_file, "cache_secret_file", _NUM_BYTES)
    if shared_cache is not None and is_server(shared_cache):
        raise ValueError(
            "cache_secret_file: expected a file where shared_cache is a server, the same on all machines that share it: "
            "without, they could not find what the others computed"
        )
    if shared_cache is not None and disk_cache is not None:
        return _shared_secret(Path(shared_cache), disk_cache, may_write=not read_only)
    if shared_cache is not None:
        return _secret_or_random(Path(shared_cache), may_make=True)
    return None if disk_cache is None else _secret_or_random(disk_cache, may_make=not read_only)


def _shared_secret(shared: Path, disk: Path, *, may_write: bool) -> bytes:
    """The shared folder's secret; while that folder is gone, the disk's copy, by which the disk's blocks are still found."""
    copy = disk / _COPY_NAME
    kept = None
    try:
        # The copy first: an empty shared folder may be a mount point whose mount is gone for now.
        kept = next((_read(path) for path in (copy, disk / _NAME) if _is_made(path)), None)
    except OSError as error:  # the disk's tier will warn
        _log.info("%s; using the secret of namespaces in %s", error, shared)
    try:
        secret = namespace_secret(shared, initial=kept)
    except OSError as error:
        _log.info("%s; using the secret of namespaces in %s", error, disk)
        return kept or _secret_or_random(disk, may_make=may_write)
    if may_write and kept != secret:
        try:
            disk.mkdir(mode=0o700, parents=True, exist_ok=True)
            copy.unlink(missing_ok=True)
            _write(copy, secret)
        except OSError as error:  # likewise
            _log.info("%s; without %s, what is on the disk will not be found", error, shared)
    return secret


def _secret_or_random(folder: Path, may_make: bool) -> bytes:
    """The folder's secret; if it can be neither read nor made, a random one and a warning: tiers go on without."""
    try:
        return namespace_secret(folder, may_make)
    except OSError as error:
        effect = (
            "blocks are stored under a random secret, and perhaps not found after a restart"
            if may_make
            else "this process will find nothing there, even once another has made it: start again then, or name one "
            "cache_secret_file for both"
        )
        _log.warning("the secret of namespaces in %s cannot be used: %s; %s", folder, error, effect)
        return secrets.token_bytes(_NUM_BYTES)


def namespace_secret(folder: Path, may_make: bool = True, initial: bytes | None = None) -> bytes:
    """The folder's secret.

    Args:
        folder: is made if it is not there.
        may_make: make the folder and its secret if there is none.
        initial: the secret to make; None: a random one.

    Raises:
        OSError: it can be neither read nor written.
        ValueError: the file holds something else.
    """
    path = folder / _NAME
    if may_make and not _is_made(path):
        _make(path, initial or secrets.token_bytes(_NUM_BYTES))
    return _read(path)


def keep_secret(folder: Path, secret: bytes) -> None:
    """Have a folder hold the secret that is in use: put it back if the folder was emptied.

    Raises:
        OSError: it can be neither read nor written, or `check_secret` raises it.
    """
    path = folder / _NAME
    if not _is_made(path):
        _make(path, secret)
    check_secret(folder, secret)


def check_secret(folder: Path, secret: bytes) -> None:
    """Check that a folder holds the secret that is in use, or none.

    Raises:
        OSError: it cannot be read, or the folder holds another one, as a disk that is mounted late may.
    """
    path = folder / _NAME
    try:
        found = _content_of(path)
    except FileNotFoundError:
        return
    if found != secret:
        raise OSError(
            errno.ESTALE, "another folder, with another secret, is in its place; start again to use it", str(path)
        )


def _make(path: Path, secret: bytes) -> None:
    """`_write` into a folder that is made if it is not there. What is written then counts, even if it cannot be synced."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        _write(path, secret)
    except OSError as error:
        if not _is_made(path):
            raise
        _log.info("%s; a power cut may take %s away", error, path)


def _write(path: Path, secret: bytes) -> None:
    """Create the file atomically; if another process has made it first, that one stays."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    try:
        with open(draft, "wb", opener=open_private) as file:
            file.write(secret)
        sync(draft)
        _rename_to_new(draft, path)
        sync(path.parent)
    finally:
        draft.unlink(missing_ok=True)


def _rename_to_new(draft: Path, path: Path) -> None:
    """Give a file its name, unless another with content has it. The draft may stay.

    Raises:
        OSError: as from the system.
    """
    try:
        return os.link(draft, path)
    except OSError as error:
        if error.errno not in _NO_LINK:
            raise
    if _is_made(path):
        return None  # without a lock, which not every file system has, or a right to write that file
    # An empty file takes the name, and the process that locks it replaces it; or the next one, if that is killed before.
    with open(path, "ab", opener=open_private) as place:
        fcntl.flock(place, fcntl.LOCK_EX)
        if not _is_made(path):
            os.replace(draft, path)


def _is_made(path: Path) -> bool:
    """Whether the file is there, and not empty.

    Raises:
        OSError: the medium fails.
    """
    try:
        return path.stat().st_size > 0
    except FileNotFoundError:
        return False


def _content_of(path: Path) -> bytes:
    """What is in a file, which `_rename_to_new` leaves empty for a moment where there are no hard links.

    Raises:
        FileNotFoundError: it is not there, or stays empty: the process that was making it was killed.
    """
    for _ in range(_ATTEMPTS):
        with open(path, "rb", opener=open_private) as file:
            content = file.read()
        if content:
            return content
        time.sleep(_SECONDS_BETWEEN_ATTEMPTS)
    raise FileNotFoundError(errno.ENOENT, "the file is empty", str(path))


def _read(path: Path) -> bytes:
    secret = _content_of(path)
    if len(secret) != _NUM_BYTES:
        raise ValueError(f"{path}: expected {_NUM_BYTES} bytes, got {len(secret)}: remove it to have it made again")
    return secret
