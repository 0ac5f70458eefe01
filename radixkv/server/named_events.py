"""Server-sent events named by the ``type`` of what they carry. The last one says itself that it is the last."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator

from pydantic import BaseModel

from radixkv.server.encoded import encode


async def named_events(events: AsyncIterator[BaseModel]) -> AsyncGenerator[bytes, None]:
    """Events as they are sent; each model has a field ``type``."""
    async for event in events:
        yield named_event(event)


def named_event(event: BaseModel) -> bytes:
    """An event as it is sent; the model has a field ``type``."""
    kind: str = event.type  # type: ignore[attr-defined]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode(event))
