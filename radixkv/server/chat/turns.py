"""The messages of a conversation whose parts other protocols write apart."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Turns:
    """Messages in the form of chat completions, as they grow.

    Successive texts of one role are one message, because many chat templates refuse two of one role in a row, or a second
    system message.
    Templates write reasoning, text and calls of a message in this order: so reasoning, or text after a call, begins a new
    message.

    Args:
        messages: those to go on from. They are not changed: other conversations may begin with them, too.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]] = ()) -> None:
        self._messages = list(messages)
        # Texts of this role, and calls behind them, that are not in a message yet: to add each to those before takes time
        # that grows with the square of their number.
        self._role = ""
        self._texts: list[str] = []
        self._calls: list[Mapping[str, Any]] = []
        # Whether reasoning was added since the last text that is in a message.
        self._has_reasoning = False

    def add_text(self, role: str, text: str) -> None:
        """Go on with a role's text, or begin it. Texts of the assistant follow each other directly, others on new lines."""
        if self._calls or role != self._role:
            self._write()
        self._role = role
        self._texts.append(text)

    def add_reasoning(self, text: str) -> None:
        """Begin a message of the assistant with its reasoning; empty: that is not known, and its next text begins one."""
        if text or (self._texts and self._role == "assistant"):
            self._write()
        if text:
            self._messages.append({"role": "assistant", "content": None, "reasoning_content": text})
        self._has_reasoning = True

    def add_call(self, call_id: str, name: str, arguments: str) -> None:
        """Add a call of a function by the assistant, with JSON text of its arguments."""
        self._calls.append({"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}})

    def begin_result(self, call_id: str) -> None:
        """Begin what a called function returned, to which texts of the role "tool" are to be added."""
        self._write()
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": None})

    def messages(self) -> list[Mapping[str, Any]]:
        """All of them so far; what is added later does not change them."""
        self._write()
        return list(self._messages)

    def _write(self) -> None:
        """Put what is in no message yet into the last one, if that is its role's, or into a new one."""
        if self._texts:
            message = self._pop(self._role)
            is_before_reasoning = self._has_reasoning and self._role == "assistant" and message["content"] is not None
            if "tool_calls" in message or is_before_reasoning:
                self._messages.append(message)
                message = {"role": self._role, "content": None}
            before = [] if message["content"] is None else [message["content"]]
            text = ("" if self._role == "assistant" else "\n").join([*before, *self._texts])
            self._messages.append({**message, "content": text})
            self._texts, self._has_reasoning = [], False
        if self._calls:
            message = self._pop("assistant")
            self._messages.append({**message, "tool_calls": [*message.get("tool_calls", ()), *self._calls]})
            self._calls = []

    def _pop(self, role: str) -> Mapping[str, Any]:
        """The last message, taken out, if it is this role's; otherwise a new one."""
        if self._messages and self._messages[-1]["role"] == role:
            return self._messages.pop()
        return {"role": role, "content": None}
