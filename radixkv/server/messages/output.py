"""An answer's pieces, made into content blocks and the events that announce them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import pydantic_core
from pydantic import BaseModel

from radixkv.server.messages.objects import (
    Content,
    MessageObject,
    MessageUsage,
    StopReason,
    TextContent,
    ThinkingContent,
    ToolUseContent,
)
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin


class MessageStart(BaseModel):
    """The message without content."""

    type: Literal["message_start"] = "message_start"
    message: MessageObject


class Ping(BaseModel):
    """Nothing yet."""

    type: Literal["ping"] = "ping"


class BlockStart(BaseModel):
    """A block begins, empty."""

    type: Literal["content_block_start"] = "content_block_start"
    index: int
    content_block: Content


class TextDelta(BaseModel):
    """More text."""

    type: Literal["text_delta"] = "text_delta"
    text: str


class ThinkingDelta(BaseModel):
    """More thinking."""

    type: Literal["thinking_delta"] = "thinking_delta"
    thinking: str


class InputJsonDelta(BaseModel):
    """More of the JSON text of a tool's input."""

    type: Literal["input_json_delta"] = "input_json_delta"
    partial_json: str


class BlockDelta(BaseModel):
    """A block grows."""

    type: Literal["content_block_delta"] = "content_block_delta"
    index: int
    delta: TextDelta | ThinkingDelta | InputJsonDelta


class BlockStop(BaseModel):
    """A block is complete."""

    type: Literal["content_block_stop"] = "content_block_stop"
    index: int


class StopDelta(BaseModel):
    """Why the message ended; null while it has not."""

    stop_reason: StopReason | None
    stop_sequence: str | None


class MessageDelta(BaseModel):
    """The message is complete."""

    type: Literal["message_delta"] = "message_delta"
    delta: StopDelta
    usage: MessageUsage


class MessageStop(BaseModel):
    """The last event."""

    type: Literal["message_stop"] = "message_stop"


class MessageContent:
    """The content of one message as it grows: one block is open at a time.

    Args:
        shows_thinking: False: blocks of thinking stay empty.

    Attributes:
        blocks: those begun so far. What a block says is in it when it has ended.
    """

    def __init__(self, *, shows_thinking: bool = True) -> None:
        self.blocks: list[Content] = []
        self._shows_thinking = shows_thinking
        self._open = False
        self._texts: list[str] = []  # of the open block

    def add(self, piece: AnswerPiece) -> Iterator[BaseModel]:
        """Add a piece to the open block, or end the block and begin another one; yields the events for it."""
        match piece:
            case TextPiece(text):
                yield from self._open_as(TextContent(text=""))
                yield self._delta(TextDelta(text=text), text)
            case ReasoningPiece(text):
                yield from self._open_as(ThinkingContent(thinking=""))
                if self._shows_thinking:
                    yield self._delta(ThinkingDelta(thinking=text), text)
            case ToolCallBegin(_, call_id, name):
                yield from self._begin(ToolUseContent(id=call_id, name=name, input={}))
            case ToolCallArguments(_, text):
                yield self._delta(InputJsonDelta(partial_json=text), text)

    def end(self) -> Iterator[BaseModel]:
        """End the open block; yields the events of it."""
        if not self._open:
            return
        self._open = False
        block, text = self.blocks[-1], "".join(self._texts)
        match block:
            case TextContent():
                block.text = text
            case ThinkingContent():
                block.thinking = text
            case ToolUseContent():
                block.input = _parsed(text)
        yield BlockStop(index=len(self.blocks) - 1)

    def _open_as(self, empty: TextContent | ThinkingContent) -> Iterator[BaseModel]:
        """Begin this block, unless one of its kind is open."""
        if not (self._open and isinstance(self.blocks[-1], type(empty))):
            yield from self._begin(empty)

    def _begin(self, block: Content) -> Iterator[BaseModel]:
        yield from self.end()
        self.blocks.append(block)
        self._open = True
        self._texts = []
        yield BlockStart(index=len(self.blocks) - 1, content_block=block.model_copy())

    def _delta(self, delta: TextDelta | ThinkingDelta | InputJsonDelta, text: str) -> BlockDelta:
        self._texts.append(text)
        return BlockDelta(index=len(self.blocks) - 1, delta=delta)


def _parsed(arguments: str) -> dict[str, Any]:
    """The arguments of a call; if it was cut short, those that are complete.

    Text that is not a JSON object at all, which only a model with unconstrained calls writes, becomes an empty input.
    """
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_partial=True)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
