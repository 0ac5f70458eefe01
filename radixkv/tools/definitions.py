"""Tools as a request describes them, and answers with calls of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from radixkv.tools.events import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool.

    Attributes:
        id: names the call in the message with its result.
        arguments: JSON text of an object.
    """

    id: str
    name: str
    arguments: str


@dataclass
class ParsedAnswer:
    """A whole answer, its parts apart.

    Attributes:
        text: what is neither reasoning nor a call.
        reasoning: what the model thought before; None: it did not.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
        """The answer that consists of these pieces."""
        answer = cls()
        arguments: list[list[str]] = []
        begun: list[ToolCallBegin] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    answer.text += text
                case ReasoningPiece(text):
                    answer.reasoning = (answer.reasoning or "") + text
                case ToolCallBegin():
                    begun.append(piece)
                    arguments.append([])
                case ToolCallArguments(index, text):
                    arguments[index].append(text)
        answer.tool_calls = [
            ToolCall(call.id, call.name, "".join(texts)) for call, texts in zip(begun, arguments, strict=True)
        ]
        return answer

    def as_message(self) -> dict[str, Any]:
        """The answer as a message of a conversation, in OpenAI's form."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.tool_calls
            ]
        return message
