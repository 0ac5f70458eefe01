"""Reusable memory for blocks on their way out of a pool on the host."""

from __future__ import annotations

from threading import Lock

import torch

from radixkv.memory.pages import take_pages

_MAX_SPARE_BYTES = 128 << 20


class SpareRows:
    """Gives out rows of bytes and takes them back; any thread may call.

    Taking memory from the system anew each time would cost three times as much as the copy that it is for.

    Args:
        nbytes: of a row.
        max_spare_bytes: kept for later at most; memory larger than that is not kept.
    """

    def __init__(self, nbytes: int, max_spare_bytes: int = _MAX_SPARE_BYTES) -> None:
        self._nbytes = nbytes
        self._max_spare_bytes = max_spare_bytes
        self._spare: list[torch.UntypedStorage] = []  # longest kept first
        self._spare_bytes = 0
        self._lock = Lock()

    def take(self, count: int) -> torch.Tensor:
        """Rows of arbitrary content, uint8 ``[count, nbytes]``."""
        size = count * self._nbytes
        with self._lock:
            fitting = [(each.nbytes(), index) for index, each in enumerate(self._spare) if each.nbytes() >= size]
            storage = self._spare.pop(min(fitting)[1]) if fitting else None
            self._spare_bytes -= 0 if storage is None else storage.nbytes()
        if storage is None:
            rows = torch.empty(count, self._nbytes, dtype=torch.uint8)
            take_pages(rows.data_ptr(), size)
            return rows
        return torch.empty(0, dtype=torch.uint8).set_(storage)[:size].view(count, self._nbytes)

    def give_back(self, rows: torch.Tensor) -> None:
        """Rows from `take` that nothing uses any more."""
        storage = rows.untyped_storage()
        if storage.nbytes() > self._max_spare_bytes:
            return
        # Returned to the system after the lock is released: that takes milliseconds, for which `take` would wait.
        too_much = []
        with self._lock:
            self._spare.append(storage)
            self._spare_bytes += storage.nbytes()
            while self._spare_bytes > self._max_spare_bytes:
                too_much.append(self._spare.pop(0))
                self._spare_bytes -= too_much[-1].nbytes()
