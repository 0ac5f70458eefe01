"""Reads streams of server-sent events that are named by their types."""

from __future__ import annotations

import json
from typing import Any


def named_events(text: str) -> list[dict[str, Any]]:
    """The events of a whole stream; asserts that each has its own type as its name."""
    events = []
    for chunk in text.strip().split("\n\n"):
        name, data = chunk.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events
