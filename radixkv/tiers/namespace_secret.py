"""The secret of stored namespaces: who has it can tell which tenant a block belongs to, and nobody else can."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from radixkv.tiers.store_folder import open_private

_NAME = "namespaces.secret"
_NUM_BYTES = 32


def is_server(store: str) -> bool:
    """Whether a shared store is a server; else it is a folder."""
    return "://" in store


def find_secret(secret_file: Path | None, disk_cache: Path | None, shared_cache: str | None) -> bytes | None:
    """The secret that a configuration of tiers names; None: it names no file, and no folder in which to keep one.

    Args:
        secret_file: 64 hexadecimal digits.
        disk_cache: a folder.
        shared_cache: a folder or a server. What is shared by folder has its secret there, since all machines need it.

    Raises:
        OSError: a file can be neither read nor written.
        ValueError: the file holds something else.
    """
    if secret_file is not None:
        try:
            secret = bytes.fromhex(secret_file.read_text().strip())
        except ValueError:
            secret = b""
        if len(secret) != _NUM_BYTES:
            digits = 2 * _NUM_BYTES
            raise ValueError(
                f"cache_secret_file: expected {digits} hexadecimal digits in {secret_file}, as `openssl rand -hex "
                f"{_NUM_BYTES}` prints"
            )
        return secret
    if shared_cache is not None and not is_server(shared_cache):
        return namespace_secret(Path(shared_cache))
    return None if disk_cache is None else namespace_secret(disk_cache)


def namespace_secret(folder: Path) -> bytes:
    """The folder's secret, drawn at random when it is first asked for; the folder is made if it is not there.

    Raises:
        OSError: it can be neither read nor written.
        ValueError: the file holds something else.
    """
    path = folder / _NAME
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        draft = path.with_name(f"{_NAME}.{os.getpid()}.{secrets.token_hex(4)}")
        with open(draft, "wb", opener=open_private) as file:
            file.write(secrets.token_bytes(_NUM_BYTES))
        try:
            os.link(draft, path)  # unlike a rename, it leaves another process's secret in place
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    secret = path.read_bytes()
    if len(secret) != _NUM_BYTES:
        raise ValueError(f"{path}: expected {_NUM_BYTES} bytes, got {len(secret)}: remove it to have it made again")
    return secret
