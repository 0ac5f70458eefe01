"""A disk that fails on demand, in the place of a module's `os`."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from support.tier_model import FakeClock

FAULTS = ("none", "read fails", "short read", "wrong bytes", "write fails", "full", "torn write", "gone", "slow")


class FaultyOs:
    """Everything that `os` has; some calls do what ``fault`` says.

    Attributes:
        fault: one of `FAULTS`.
        clock: passes ten seconds in each read and write, where the disk is slow.
    """

    def __init__(self, clock: FakeClock | None = None) -> None:
        self.fault = "none"
        self.clock = clock or FakeClock()

    def __getattr__(self, name: str) -> Any:
        if self.fault == "gone" and name in ("preadv", "pwritev", "posix_fallocate", "ftruncate", "open", "replace"):
            raise OSError(errno.ESTALE, "the disk is gone")
        return getattr(os, name)

    def preadv(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.fault in ("read fails", "gone"):
            raise OSError(errno.EIO, "unreadable")
        self._wait()
        length = os.preadv(descriptor, buffers, offset)
        if self.fault == "short read":
            return length - 1
        if self.fault == "wrong bytes":
            np.frombuffer(buffers[-1], np.uint8)[-1:] ^= 1
        return length

    def pwritev(self, descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if self.fault in ("write fails", "gone"):
            raise OSError(errno.EIO, "unwritable")
        if self.fault == "full":
            raise OSError(errno.ENOSPC, "no space left")
        self._wait()
        length = sum(map(len, buffers))
        if self.fault == "torn write":  # silently
            os.pwritev(descriptor, buffers[:-1], offset)
            return length
        return os.pwritev(descriptor, buffers, offset)

    def posix_fallocate(self, descriptor: int, offset: int, length: int) -> None:
        if self.fault in ("full", "gone"):
            raise OSError(errno.ENOSPC, "no space left")
        os.posix_fallocate(descriptor, offset, length)

    def _wait(self) -> None:
        if self.fault == "slow":
            self.clock.now += 10


@contextmanager
def disconnected(folder: Path) -> Iterator[None]:
    """Nobody can ask for a folder, or for what is below it, like a mount whose server is gone."""
    stat = os.stat

    def fail_there(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if str(path).startswith(str(folder)):
            raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN), str(path))
        return stat(path, *arguments, **options)

    with mock.patch.object(os, "stat", fail_there):
        yield
