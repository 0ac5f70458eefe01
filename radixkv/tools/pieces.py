"""The pieces of which an answer consists, and the answer that they make."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True, slots=True)
class TextPiece:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningPiece:
    """More of the model's reasoning, which precedes its answer."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallBegin:
    """A call of a tool begins; the calls of an answer are numbered from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


AnswerPiece = TextPiece | ReasoningPiece | ToolCallBegin | ToolCallArguments


class ReadPiece(NamedTuple):
    """A piece, and how many characters of the answer end with it, as the model wrote it."""

    piece: AnswerPiece
    end: int


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
    """The parts of a whole answer.

    Attributes:
        text: what is neither reasoning nor a call.
        reasoning: what the model thought before it answered; None: there is none.
    """

    text: str = ""
    reasoning: str | None = None
    tool_calls: list[ToolCall] = field(default_factory=list)

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece]) -> ParsedAnswer:
        """The answer that consists of these pieces."""
        texts: list[str] = []
        thoughts: list[str] = []
        calls: list[tuple[ToolCallBegin, list[str]]] = []
        for piece in pieces:
            match piece:
                case TextPiece(text):
                    texts.append(text)
                case ReasoningPiece(text):
                    thoughts.append(text)
                case ToolCallBegin():
                    calls.append((piece, []))
                case ToolCallArguments(index, text):
                    calls[index][1].append(text)
        return cls(
            text="".join(texts),
            reasoning="".join(thoughts) if thoughts else None,
            tool_calls=[ToolCall(call.id, call.name, "".join(arguments)) for call, arguments in calls],
        )

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
