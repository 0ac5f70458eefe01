"""The content blocks of messages, and where a client asks for the prefix before a point to stay cached."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.server.not_supported import Only
from radixkv.server.strict import StrictModel
from radixkv.server.unions import OneOf

MAX_BLOCKS = 4096


class CacheControl(StrictModel):
    """Keep the prompt up to here cached, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: Only[Annotated[list[Any], Field(max_length=0)] | None] = None


class ToolUseBlock(StrictModel):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: Only[None] = None


class MediaBlock(StrictModel):
    """An image or a document. In a tool's result, which its user cannot change, a note stands for it."""

    type: Literal["image", "document"]
    source: dict[str, Any]
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    @property
    def text(self) -> str:
        """The note."""
        return f"[{self.type} left out: this model reads text only]"


ResultPart = Annotated[TextBlock | MediaBlock, OneOf("content blocks")]


class ToolResultBlock(StrictModel):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultPart], Field(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Only[None] = None


class ThinkingBlock(StrictModel):
    """What the assistant thought before it answered. The signature is not checked: clients may write a history."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None
    cache_control: None = None


class RedactedThinkingBlock(StrictModel):
    """Thinking that another server encrypted; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str
    cache_control: None = None


Block = Annotated[
    TextBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock | MediaBlock,
    OneOf("content blocks"),
]
