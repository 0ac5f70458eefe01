"""Gives back a checkpoint's mapped pages once the weights in them are copied elsewhere."""

from __future__ import annotations

import ctypes
import logging
import os
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from radixkv.memory.pages import madvise

_DONT_NEED = 4  # MADV_DONTNEED
# Sizes in smaps of what no file has: what was written, also where it was swapped out, and large pages that malloc may use,
# which are listed as pages of a file.
_OWN_PAGES = frozenset({"Anonymous:", "Shared_Hugetlb:", "Private_Hugetlb:", "Swap:"})

_log = logging.getLogger(__name__)


class MappedWeights:
    """Files that parameters of a model are mapped from; none where the system does not list its mappings.

    Parameters that are loaded in their stored type are mapped pages of the file. A page that was read counts as the process's
    memory while any weight of the file is in use, so packed copies would come on top of all of them.

    A mapping that was written to is left alone, or the changes would be lost. The others stay mapped while this object lives.

    Args:
        model: on the CPU.

    Attributes:
        spans: address and bytes of each mapping, but of those that the system would not give back.
    """

    def __init__(self, model: nn.Module) -> None:
        parameters = [parameter for parameter in model.parameters() if parameter.device.type == "cpu"]
        self.spans: list[tuple[int, int]] = []
        # Were they freed, something else could come to lie at their addresses.
        self._storages: list[torch.UntypedStorage] = []
        addresses = sorted(parameter.data_ptr() for parameter in parameters)
        # To count a large process's pages takes tens of milliseconds.
        if not any(bisect_left(addresses, start) < bisect_left(addresses, stop) for start, stop in _files()):
            return
        for start, stop in _unwritten_files():
            mapped = [parameter for parameter in parameters if start <= parameter.data_ptr() < stop]
            if mapped:
                self.spans.append((start, stop - start))
                self._storages += [parameter.untyped_storage() for parameter in mapped]

    @contextmanager
    def filled(self, module: nn.Module) -> Iterator[None]:
        """Within, a module's weights may be read; afterwards the pages that were read are given back."""
        yield
        self.release()

    def release(self) -> None:
        """Give back the pages that were read. What is read again comes from the file, or the system's cache of it.

        Where the system refuses, as with memory that is locked, a warning says so once, and they stay.
        """
        for start, size in list(self.spans):
            if madvise(start, size, _DONT_NEED):
                reason = os.strerror(ctypes.get_errno())
                self.spans.remove((start, size))
                _log.warning(
                    "a checkpoint's file of %d bytes stays in memory beside its copy: madvise: %s", size, reason
                )


def _files() -> Iterator[tuple[int, int]]:
    """Where this process has mapped files: start and stop."""
    for line in _listed("maps"):
        span = _file_span(line)
        if span is not None:
            yield span


def _unwritten_files() -> Iterator[tuple[int, int]]:
    """Those of `_files` in whose place the process has no pages of its own."""
    span: tuple[int, int] | None = None
    for line in _listed("smaps"):
        name, *rest = line.split(maxsplit=2)
        if not name.endswith(":"):
            span = _file_span(line)
        elif name in _OWN_PAGES and rest[0] != "0":
            span = None
        elif name == "VmFlags:" and span is not None:  # the last line of a mapping
            yield span


def _listed(name: str) -> list[str]:
    try:
        return Path("/proc/self", name).read_text().splitlines()
    except OSError:
        return []


def _file_span(line: str) -> tuple[int, int] | None:
    """Start and stop of the mapping that a line describes; None: it is of no file."""
    addresses, *rest = line.split(maxsplit=5)
    if not rest[-1].startswith("/"):
        return None
    start, stop = (int(part, 16) for part in addresses.split("-"))
    return start, stop
