"""Notices that nothing comes any more, on an event loop that may itself be late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

_NUM_LOOKS = 10


@asynccontextmanager
async def until_silent(seconds: float) -> AsyncIterator[Callable[[], None]]:
    """A block that ends when nothing has been heard in it for so long.

    Silence is counted in looks, each of which waits a tenth of the time. While the event loop stands still there is one look
    at most, and what has come meanwhile is read before the next.

    Args:
        seconds: without a stall.

    Yields:
        A function to be called whenever something is heard.

    Raises:
        TimeoutError: nothing was heard.
    """
    num_silent = 0

    def hear() -> None:
        nonlocal num_silent
        num_silent = 0

    async def look() -> None:
        nonlocal num_silent
        while num_silent < _NUM_LOOKS:
            await asyncio.sleep(seconds / _NUM_LOOKS)
            num_silent += 1
        scope.reschedule(0.0)

    async with asyncio.timeout(None) as scope:
        looking = asyncio.ensure_future(look())
        try:
            yield hear
        finally:
            looking.cancel()
