"""How long the engine's thread has been at its current step, so that a step that never ends is seen from outside."""

from __future__ import annotations

import time
from collections.abc import Callable


class Heartbeat:
    """Written by one thread, read by any.

    Args:
        clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._began: float | None = None

    def begin(self) -> None:
        """A step, or a function between two steps, begins."""
        self._began = self._clock()

    def rest(self) -> None:
        """There is nothing to do."""
        self._began = None

    @property
    def seconds(self) -> float:
        """Since the current step or function began; 0 while there is nothing to do."""
        began = self._began
        return 0.0 if began is None else self._clock() - began
