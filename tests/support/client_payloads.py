"""Requests of completions and chats, and how they are posted."""

from __future__ import annotations

import json
from typing import Any

import httpx

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Name three colours."}], "temperature": 0}
TEXT: dict[str, Any] = {"prompt": "One, two, three,", "temperature": 0}


async def post(client: httpx.AsyncClient, path: str, body: dict[str, Any], status: int = 200) -> Any:
    response = await client.post(path, json=body)
    assert response.status_code == status, response.text
    if body.get("stream"):
        events = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
        assert events.pop() == "[DONE]"
        return [json.loads(event) for event in events]
    return response.json()
