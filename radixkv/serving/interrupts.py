"""Ctrl-C takes effect between two steps rather than inside one, so that no step is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class DeferredInterrupt:
    """Remembers a Ctrl-C until it is asked for."""

    def __init__(self) -> None:
        self._requested = False

    def request(self, signum: int, frame: FrameType | None) -> None:
        if self._requested:
            raise KeyboardInterrupt  # the second Ctrl-C does not wait for the step
        self._requested = True

    def raise_if_requested(self) -> None:
        """Raise KeyboardInterrupt if Ctrl-C was pressed."""
        if self._requested:
            raise KeyboardInterrupt


@contextmanager
def deferred_interrupt() -> Iterator[DeferredInterrupt]:
    """While inside, Ctrl-C is only noted. Signals reach the main thread alone: in others there is nothing to defer."""
    interrupt = DeferredInterrupt()
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGINT) is None:
        yield interrupt
        return
    before = signal.signal(signal.SIGINT, interrupt.request)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, before)
