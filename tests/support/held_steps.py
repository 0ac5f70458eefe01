"""Steps of an engine that a test allows: nothing ends, and nothing is admitted, before the test has done its part."""

from __future__ import annotations

import threading
from typing import Any

from support.time_limit import HANGING

from radixkv.engine.engine import Engine


class HeldSteps:
    """From now on, each of an engine's steps waits until it is allowed.

    Args:
        engine: not in the middle of a step.

    Attributes:
        is_holding: whether a step waits: nothing else of the engine happens either.
    """

    def __init__(self, engine: Engine) -> None:
        self.is_holding = False
        self._allowed, self._all = threading.Semaphore(0), threading.Event()
        self._step = engine.step
        engine.step = self._held  # type: ignore[method-assign]

    def allow(self, count: int) -> None:
        """That many more steps."""
        self._allowed.release(count)

    def allow_all(self) -> None:
        """Hold none from now on."""
        self._all.set()
        self._allowed.release()

    def _held(self) -> Any:
        if not self._all.is_set() and not self._allowed.acquire(blocking=False):
            self.is_holding = True
            assert self._allowed.acquire(timeout=HANGING)
            self.is_holding = False
        return self._step()
