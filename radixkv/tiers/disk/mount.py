"""A folder that may lie on a mounted disk, and be gone with it for a while."""

from __future__ import annotations

import errno
from pathlib import Path

from radixkv.tiers.disk.store_folder import identity_of

_GONE = "what was mounted is gone; nothing is written until it is back, or until the next start"


class Mount:
    """The device that a folder is on, noted so that an empty mount point is not taken for the folder.

    Nor is an empty disk that is mounted in its place: an automounter's placeholder looks the same, and what was cleared there
    would come back with the first disk.

    Args:
        folder: made by its user if it is not there.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._device: int | None = None

    def check(self) -> None:
        """Note the folder's device, if it is there.

        Raises:
            OSError: the device fails, or the folder is missing and would be made on another one: what was mounted is gone for
                now, and would later hide what is written in its place.
        """
        paths = (self._folder, *self._folder.parents)
        existing, (device, _) = next((path, found) for path in paths if (found := identity_of(path)) is not None)
        if existing == self._folder:
            self._device = device
        elif self._device not in (None, device):
            raise OSError(errno.ESTALE, _GONE, str(self._folder.parent))
