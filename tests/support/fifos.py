"""FIFOs in the place of files: who opens one blocks until another process opens its other end."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Far longer than what a test does there takes.
_MAX_SECONDS = 60.0


@contextmanager
def not_blocked_by(path: Path) -> Iterator[None]:
    """What opens a FIFO within the context, and blocks, is let go after a while, and the test fails."""
    is_over, was_blocked = threading.Event(), threading.Event()

    def let_go() -> None:
        if is_over.wait(_MAX_SECONDS):
            return
        was_blocked.set()
        while not is_over.wait(0.1):
            with suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_NONBLOCK))

    watching = threading.Thread(target=let_go, daemon=True)
    watching.start()
    try:
        yield
    finally:
        is_over.set()
        watching.join()
    assert not was_blocked.is_set(), f"{path} was waited for"
