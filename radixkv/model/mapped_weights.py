"""Pages of a checkpoint's file that weights still lie in, while they are copied elsewhere."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path

from torch import nn

_DONT_NEED = 4  # MADV_DONTNEED


class MappedWeights:
    """Files that parameters of a model are mapped from. Where the system says nothing about mappings, there are none.

    Loaded in the type that they are stored in, parameters are no copies: they are the file's pages, mapped. A page that was
    read counts as the process's memory as long as any weight of the file is in use, so packed copies come on top of all.

    A mapping that anything was written to is left alone: what was written would be lost.

    Args:
        model: on the CPU.

    Attributes:
        spans: address and bytes of each mapping.
    """

    def __init__(self, model: nn.Module) -> None:
        addresses = [parameter.data_ptr() for parameter in model.parameters() if parameter.device.type == "cpu"]
        self.spans = [
            (start, stop - start)
            for start, stop in _unwritten_files()
            if any(start <= address < stop for address in addresses)
        ]

    def release(self) -> None:
        """Give back the pages that were read. What is read again comes from the file, or the system's cache of it."""
        libc = ctypes.CDLL(None, use_errno=True)
        for start, size in self.spans:
            if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(size), _DONT_NEED):
                error = ctypes.get_errno()
                raise OSError(error, f"madvise: {os.strerror(error)}")


def _unwritten_files() -> Iterator[tuple[int, int]]:
    """Where this process has mapped files and has no pages of its own in their place: start and stop."""
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return
    span: tuple[int, int] | None = None
    for line in lines:
        name, *rest = line.split(maxsplit=5)
        if not name.endswith(":"):
            start, stop = (int(part, 16) for part in name.split("-"))
            span = (start, stop) if rest[-1].startswith("/") else None
        elif name == "Anonymous:" and rest[0] == "0" and span is not None:
            yield span
