"""Numbered files, of which few are open at a time."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class _OpenFile:
    descriptor: int
    num_users: int = 0


class OpenFiles:
    """Keeps open the files that are in use, and the most recently used ones. Any thread may call.

    Args:
        open_file: opens one by its number.
        most: how many are kept open; there are more only while more are in use.
    """

    def __init__(self, open_file: Callable[[int], int], most: int) -> None:
        self._open_file = open_file
        self._most = most
        self._lock = threading.Lock()
        self._files: OrderedDict[int, _OpenFile] = OrderedDict()  # least recently used first

    @contextmanager
    def opened(self, index: int) -> Iterator[int]:
        """The descriptor of a file that stays open within the context.

        Raises:
            OSError: it cannot be opened.
        """
        with self._lock:
            file = self._files.get(index)
            if file is None:
                self._close_unused(self._most - 1)
                file = self._files[index] = _OpenFile(self._open_file(index))
            self._files.move_to_end(index)
            file.num_users += 1
        try:
            yield file.descriptor
        finally:
            with self._lock:
                file.num_users -= 1
                self._close_unused(self._most)

    def close(self) -> None:
        """Keep no file open any more; those in use are closed after their use."""
        with self._lock:
            self._most = 0
            self._close_unused(0)

    def _close_unused(self, most: int) -> None:
        if len(self._files) <= most:
            return
        unused = [index for index, file in self._files.items() if not file.num_users]
        for index in unused[: len(self._files) - max(0, most)]:
            os.close(self._files.pop(index).descriptor)
