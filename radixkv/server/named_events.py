"""Server-sent events that have a name: the ``type`` of what they carry. The last one says itself that it is the last."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from pydantic import BaseModel


async def named_events(events: AsyncIterator[BaseModel]) -> AsyncGenerator[str, None]:
    """Events as they are sent; each model has a field ``type``."""
    async for event in events:
        yield f"event: {event.type}\ndata: {event.model_dump_json()}\n\n"  # type: ignore[attr-defined]
