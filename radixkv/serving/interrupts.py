"""Ctrl-C takes effect between two steps rather than inside one, so that no step is left half done."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class DeferredInterrupt:
    """Keeps a Ctrl-C from the program's handler until it is delivered.

    Args:
        handler: the program's; Python's own raises KeyboardInterrupt.
    """

    def __init__(self, handler: Callable[[int, FrameType | None], Any]) -> None:
        self._handler = handler
        self._pending: tuple[int, FrameType | None] | None = None

    def note(self, signum: int, frame: FrameType | None) -> None:
        """Called in place of the handler."""
        if self._pending is not None:
            self._handler(signum, frame)  # the second Ctrl-C does not wait for the step
        self._pending = signum, frame

    def deliver(self) -> None:
        """Call the handler if Ctrl-C was pressed since the last time."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._handler(*pending)


@contextmanager
def deferred_interrupt() -> Iterator[DeferredInterrupt]:
    """While inside, Ctrl-C waits for `DeferredInterrupt.deliver`, at the latest for the end.

    Nothing is deferred where Ctrl-C is ignored or ends the program, nor outside the main thread, which alone gets signals.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield DeferredInterrupt(signal.default_int_handler)
        return
    interrupt = DeferredInterrupt(handler)
    signal.signal(signal.SIGINT, interrupt.note)
    try:
        yield interrupt
    finally:
        if signal.getsignal(signal.SIGINT) == interrupt.note:  # unless the program's handler has set another one
            signal.signal(signal.SIGINT, handler)
        interrupt.deliver()
