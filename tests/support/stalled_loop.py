"""An event loop whose time passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


def stalling(loop: asyncio.AbstractEventLoop) -> Callable[[float], None]:
    """A function that sets the clock of a loop forward, as if the loop had stood still for so many seconds."""
    clock, late = loop.time, 0.0

    def stall(seconds: float) -> None:
        nonlocal late
        late += seconds

    loop.time = lambda: clock() + late  # type: ignore[method-assign]
    return stall
