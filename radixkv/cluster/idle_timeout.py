"""A time limit for receiving nothing, on an event loop that may itself be late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_NUM_TICKS = 10


@asynccontextmanager
async def idle_timeout(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """A block that ends when the function that it is given has not been called for so long.

    The time is counted in ticks, each of which sleeps for a tenth of it. While the event loop stands still there is one tick
    at most, and what has arrived meanwhile is read before the next.

    Args:
        seconds: without a stall.

    Yields:
        A function that begins the count anew, to be called whenever something is received.

    Raises:
        TimeoutError: it was not called for so long.
    """
    num_idle = 0

    def restart() -> None:
        nonlocal num_idle
        num_idle = 0

    async def tick() -> None:
        nonlocal num_idle
        while num_idle < _NUM_TICKS:
            await asyncio.sleep(seconds / _NUM_TICKS)
            num_idle += 1
        scope.reschedule(0.0)

    async with asyncio.timeout(None) as scope:
        ticking = asyncio.ensure_future(tick())
        try:
            yield restart
        finally:
            ticking.cancel()
