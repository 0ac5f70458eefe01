"""The assistant's turns of a conversation, whose parts other protocols write apart."""

from __future__ import annotations

from typing import Any


def add_to_assistant_turn(
    messages: list[dict[str, Any]],
    *,
    text: str | None = None,
    reasoning: str | None = None,
    call: tuple[str, str, str] | None = None,
) -> None:
    """Add to the last message what the assistant wrote next, or begin the assistant's message.

    Reasoning always begins a message, and so does text after text or a call: within one message, templates write
    reasoning, text and calls in this order.

    Args:
        messages: the conversation in the form of chat completions; changed in place.
        call: id, name and arguments of a function call.
    """
    last = messages[-1] if messages else None
    if (
        last is None
        or last["role"] != "assistant"
        or reasoning is not None
        or (text is not None and (last["content"] is not None or "tool_calls" in last))
    ):
        last = {"role": "assistant", "content": None}
        messages.append(last)
    if reasoning is not None:
        last["reasoning_content"] = reasoning
    if text is not None:
        last["content"] = text
    if call is not None:
        call_id, name, arguments = call
        last.setdefault("tool_calls", []).append(
            {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        )
