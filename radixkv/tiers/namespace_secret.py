"""The secret of a folder's namespaces: who has it can tell which tenant a stored block belongs to, and nobody else can."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from radixkv.tiers.store_folder import open_private

_NAME = "namespaces.secret"
_NUM_BYTES = 32


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
