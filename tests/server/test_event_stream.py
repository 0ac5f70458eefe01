"""A stream whose answer does not come shows that it lives, in each protocol's way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from radixkv.server.output.event_stream import EventStream


@pytest.mark.parametrize("keep_alive", [b": keep-alive\n\n", b'event: ping\ndata: {"type":"ping"}\n\n'])
def test_a_stream_is_kept_alive_until_its_events_come(keep_alive: bytes) -> None:
    async def scenario() -> None:
        alive = asyncio.Event()
        sent: list[dict[str, Any]] = []

        async def events() -> AsyncGenerator[bytes, None]:
            await alive.wait()
            yield b"data: x\n\n"

        async def send(message: Any) -> None:
            sent.append(message)
            if [each.get("body") for each in sent].count(keep_alive) == 2:
                alive.set()

        async def receive() -> Any:
            await asyncio.Event().wait()

        response = EventStream(events(), lambda: None, keep_alive, keep_alive_seconds=0.001)
        await asyncio.wait_for(response({"type": "http", "asgi": {"spec_version": "2.3"}}, receive, send), 600)
        start, *parts, end = sent
        assert start["type"] == "http.response.start"
        assert [part["body"] for part in parts if part["body"] != keep_alive] == [b"data: x\n\n"]
        assert end == {"type": "http.response.body", "body": b"", "more_body": False}

    asyncio.run(scenario())
