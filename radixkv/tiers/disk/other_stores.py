"""Clears a tenant's blocks also in the stores of other models, types or block sizes in a disk tier's folder."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from radixkv.errors import StoreInUseError
from radixkv.threads import Worker
from radixkv.tiers.block_key import namespace_digest
from radixkv.tiers.disk.maintenance import clear
from radixkv.tiers.disk.store_folder import read_header, store_folders

_log = logging.getLogger(__name__)


class OtherStores:
    """The stores of one folder that no tier of this process has open.

    A namespace has a different name in each, which covers the store's fingerprint; with the secret, all can be computed.

    Args:
        root: the folder.
        own: the name of the store that a tier has open.
        secret: of the hash of namespaces.
    """

    def __init__(self, root: Path, own: str, secret: bytes) -> None:
        self._root = root
        self._own = own
        self._secret = secret
        self._worker = Worker("radixkv-other-stores")

    def clear(self, group: str) -> None:
        """Forget a group of namespaces in all these stores, in the background, and overwrite its blocks.

        A store that another process writes is left to that process, and an unreadable one is left as it is, both with a
        warning. Until a store's blocks are overwritten, no engine of its format can start.
        """
        self._worker.submit(partial(self._clear, group))

    def stop(self, timeout: float) -> bool:
        """Finish clearing; returns whether that took no longer than ``timeout`` seconds."""
        return self._worker.stop(timeout)

    def _clear(self, group: str) -> None:
        try:
            folders = [folder for folder in store_folders(self._root) if folder.name != self._own]
        except OSError as error:
            _log.warning("%s: the stores of other models there could not be cleared: %s", self._root, error)
            return
        for folder in folders:
            try:
                fingerprint = read_header(folder).block_format.fingerprint
                clear(folder, namespace_digest(fingerprint, group, self._secret))
            except (OSError, StoreInUseError, ValueError) as error:
                _log.warning("%s: what was cleared elsewhere could not be cleared there: %s", folder, error)
