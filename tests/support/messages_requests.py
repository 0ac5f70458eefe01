"""Parts of requests in Anthropic's form."""

from __future__ import annotations

from typing import Any

QUESTION = {"role": "user", "content": "Name three colours."}
TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
RESULT = {"type": "tool_result", "tool_use_id": "one"}
USE = {"type": "tool_use", "id": "one", "name": "f", "input": {}}
BODY: dict[str, Any] = {"model": "model", "max_tokens": 12, "temperature": 0, "messages": [QUESTION]}
