"""Slots of one size in large files whose space is taken in advance."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

from radixkv.tiers.store_folder import open_private

FILE_BYTES = 256 << 20
# Linux takes no more buffers in a call.
MAX_BUFFERS = 1024


class SlotFiles:
    """Numbered slots. Calls for different slots may come from several threads; `grow` and `shrink` from one.

    Args:
        folder: where the files are.
        slot_bytes: bytes per slot.
        writable: whether they are written.

    Attributes:
        slots_per_file: a run of slots within one file is read or written by one call.
        num_slots: how many there are.

    Raises:
        OSError: the files cannot be opened.
    """

    def __init__(self, folder: Path, slot_bytes: int, *, writable: bool) -> None:
        self.slots_per_file = max(1, FILE_BYTES // slot_bytes)
        self.num_slots = 0
        self._folder = folder
        self._slot_bytes = slot_bytes
        self._flags = os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY
        self._descriptors: list[int] = []
        self._opening = threading.Lock()
        try:
            while self._path(len(self._descriptors)).exists():
                self._open(len(self._descriptors))
        except OSError:
            self.close()
            raise
        for descriptor in self._descriptors:
            slots = min(os.fstat(descriptor).st_size // self._slot_bytes, self.slots_per_file)
            self.num_slots += slots
            if slots < self.slots_per_file:
                break

    def grow(self, most: int) -> None:
        """Take the space of one more file, or of as much of it as makes ``most`` slots in all.

        Raises:
            OSError: there is not enough space; the number of slots is as before.
        """
        index, begun = divmod(self.num_slots, self.slots_per_file)
        wanted = min(self.slots_per_file, most - index * self.slots_per_file)
        self._open(index)
        descriptor = self._descriptors[index]
        try:
            os.posix_fallocate(descriptor, 0, wanted * self._slot_bytes)
        except OSError:
            os.ftruncate(descriptor, begun * self._slot_bytes)
            raise
        self.num_slots = index * self.slots_per_file + wanted

    def shrink(self, most: int) -> None:
        """Give back the space of all but the first ``most`` slots. What reads them at the same time finds the files short.

        Raises:
            OSError: not all could be given back.
        """
        self.num_slots = min(self.num_slots, most)
        for index, descriptor in enumerate(self._descriptors):
            kept = max(0, most - index * self.slots_per_file) * self._slot_bytes
            if os.fstat(descriptor).st_size > kept:
                os.ftruncate(descriptor, kept)

    def place(self, slot: int) -> tuple[int, int]:
        """Where a slot is: an open file's descriptor, and an offset.

        Raises:
            OSError: its file cannot be opened.
        """
        index, within = divmod(slot, self.slots_per_file)
        self._open(index)  # another process may have made it since
        return self._descriptors[index], within * self._slot_bytes

    def read(self, first: int, buffers: list[memoryview]) -> int:
        """Fill buffers with the bytes from a slot on.

        Returns:
            How many bytes there were. Less than was asked for, if the file ends before.

        Raises:
            OSError: as from the system.
        """
        descriptor, offset = self.place(first)
        return os.preadv(descriptor, buffers, offset)

    def write(self, first: int, buffers: list[bytes | memoryview]) -> None:
        """Write bytes from a slot on.

        Raises:
            OSError: as from the system, or not everything was written.
        """
        descriptor, offset = self.place(first)
        if os.pwritev(descriptor, buffers, offset) != sum(map(len, buffers)):
            raise OSError(errno.EIO, "not everything was written", str(self._path(first // self.slots_per_file)))

    def close(self) -> None:
        """Close the files, which nothing may be reading."""
        while self._descriptors:
            os.close(self._descriptors.pop())
        self.num_slots = 0

    def _open(self, index: int) -> None:
        if index < len(self._descriptors):
            return
        with self._opening:
            while index >= len(self._descriptors):
                path = self._path(len(self._descriptors))
                self._descriptors.append(open_private(path, self._flags | os.O_CLOEXEC))

    def _path(self, index: int) -> Path:
        return self._folder / f"blocks-{index:05}"
