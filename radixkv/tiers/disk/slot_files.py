"""Slots of one size in large files whose space is taken in advance."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import count, pairwise
from pathlib import Path

from radixkv.tiers.disk.open_files import OpenFiles
from radixkv.tiers.disk.store_folder import open_private

FILE_BYTES = 256 << 20
# A store of a terabyte has thousands of files, and a process often no more than 1,024 descriptors.
MAX_OPEN_FILES = 32
# How much one call reads or writes.
CALL_BYTES = 256 << 10


class SlotFiles:
    """Numbered slots. Calls for different slots may come from several threads; `grow` and `shrink` from one.

    Args:
        folder: where the files are.
        slot_bytes: bytes per slot.
        writable: whether they are written.

    Attributes:
        slot_bytes: bytes per slot.
        slots_per_call: the most slots in one of `runs`.
        num_slots: how many there are.

    Raises:
        OSError: the folder cannot be read.
    """

    def __init__(self, folder: Path, slot_bytes: int, *, writable: bool) -> None:
        self.slot_bytes = slot_bytes
        self.slots_per_call = max(1, CALL_BYTES // slot_bytes)
        self.num_slots = 0
        self._slots_per_file = max(1, FILE_BYTES // slot_bytes)
        self._folder = folder
        # A FIFO in the place of a file does not block.
        self._flags = os.O_CLOEXEC | os.O_NONBLOCK | (os.O_RDWR if writable else os.O_RDONLY)
        self._files = OpenFiles(self._open, MAX_OPEN_FILES)
        for index in count():
            slots = min(self._size(index) // slot_bytes, self._slots_per_file)
            self.num_slots += slots
            if slots < self._slots_per_file:
                break

    def grow(self, most: int) -> None:
        """Take the space of one more file, or of as much of it as makes ``most`` slots in all.

        Raises:
            OSError: there is not enough space; the number of slots is as before.
        """
        index, begun = divmod(self.num_slots, self._slots_per_file)
        wanted = min(self._slots_per_file, most - index * self._slots_per_file)
        os.close(open_private(self._path(index), self._flags | os.O_CREAT))
        with self._files.opened(index) as descriptor:
            try:
                os.posix_fallocate(descriptor, 0, wanted * self.slot_bytes)
            except OSError:
                os.ftruncate(descriptor, begun * self.slot_bytes)
                raise
        self.num_slots = index * self._slots_per_file + wanted

    def shrink(self, most: int) -> None:
        """Give back the space of all but the first ``most`` slots. Concurrent readers of those find the files too short.

        Raises:
            OSError: not all could be given back.
        """
        self.num_slots = min(self.num_slots, most)
        for index in count(most // self._slots_per_file):
            kept = max(0, most - index * self._slots_per_file) * self.slot_bytes
            path = self._path(index)
            try:
                size = path.stat().st_size
            except FileNotFoundError:
                return
            if size > kept:
                os.truncate(path, kept)  # not removed: another process may have it open for reading

    @contextmanager
    def places(self, slots: Sequence[int]) -> Iterator[tuple[list[tuple[int, int]], OSError | None]]:
        """Where slots are: for each, the descriptor of a file that stays open within the context, and an offset.

        Yields the places of the leading slots whose files can be opened, and the error of the first that cannot.
        """
        descriptors: dict[int, int] = {}
        found: list[tuple[int, int]] = []
        refused: OSError | None = None
        with ExitStack() as stack:
            try:
                for slot in slots:
                    index, within = divmod(slot, self._slots_per_file)
                    if index not in descriptors:
                        descriptors[index] = stack.enter_context(self._files.opened(index))
                    found.append((descriptors[index], within * self.slot_bytes))
            except OSError as error:
                refused = error
            yield found, refused

    def runs(self, slots: Sequence[int]) -> Iterator[range]:
        """The indices in ``slots`` of the runs that one call reads or writes: consecutive slots of one file."""
        starts = [0] if slots else []
        for row, (before, slot) in enumerate(pairwise(slots), start=1):
            if slot != before + 1 or slot % self._slots_per_file == 0 or row - starts[-1] == self.slots_per_call:
                starts.append(row)
        return (range(start, stop) for start, stop in pairwise([*starts, len(slots)]))

    def read(self, first: int, buffers: list[memoryview]) -> int:
        """Fill buffers with the bytes from a slot on.

        Returns:
            How many bytes there were: fewer than asked for if the file ends before that.

        Raises:
            OSError: as from the system.
        """
        index, within = divmod(first, self._slots_per_file)
        with self._files.opened(index) as descriptor:
            return os.preadv(descriptor, buffers, within * self.slot_bytes)

    def write(self, first: int, buffers: list[bytes | memoryview]) -> None:
        """Write bytes from a slot on.

        Raises:
            OSError: as from the system, or not everything was written.
        """
        index, within = divmod(first, self._slots_per_file)
        with self._files.opened(index) as descriptor:
            if os.pwritev(descriptor, buffers, within * self.slot_bytes) != sum(map(len, buffers)):
                raise OSError(errno.EIO, "not everything was written", str(self._path(index)))

    def close(self) -> None:
        """Keep no file open: those in use, now or later, are closed after use."""
        self._files.close()

    def _open(self, index: int) -> int:
        path = self._path(index)
        try:
            return os.open(path, self._flags)
        except OSError as error:
            if error.errno != errno.EROFS:
                raise
            return os.open(path, os.O_RDONLY | os.O_CLOEXEC)  # what was written before can still be read

    def _size(self, index: int) -> int:
        try:
            return self._path(index).stat().st_size
        except FileNotFoundError:
            return 0

    def _path(self, index: int) -> Path:
        return self._folder / f"blocks-{index:05}"
