"""Messages and models as they are returned."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

StopReason = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class TextContent(BaseModel):
    """Text of an answer."""

    type: Literal["text"] = "text"
    text: str


class ThinkingContent(BaseModel):
    """Reasoning of the model; it is not signed."""

    type: Literal["thinking"] = "thinking"
    thinking: str
    signature: str = ""


class ToolUseContent(BaseModel):
    """A call of a tool, to be carried out by the client."""

    type: Literal["tool_use"] = "tool_use"
    id: str
    name: str
    input: dict[str, Any]


Content = Annotated[TextContent | ThinkingContent | ToolUseContent, Field(discriminator="type")]


class CacheCreation(BaseModel):
    """Tokens whose keeping was asked for and begins with this request, by how long."""

    ephemeral_5m_input_tokens: int = 0
    ephemeral_1h_input_tokens: int = 0


class OutputTokensDetails(BaseModel):
    """``thinking_tokens``: tokens of thinking among those generated."""

    thinking_tokens: int


class MessageUsage(BaseModel):
    """Tokens; those of the prompt are the sum of the first three.

    Attributes:
        input_tokens: neither reused nor kept by `cache_control`.
        cache_creation_input_tokens: computed now, and kept by `cache_control`.
        cache_read_input_tokens: reused rather than computed, whether kept by `cache_control` or not.
    """

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    cache_creation: CacheCreation = CacheCreation()
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class MessageObject(BaseModel):
    """The assistant's message."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[Content]
    stop_reason: StopReason | None
    stop_sequence: str | None
    usage: MessageUsage


class TokenCount(BaseModel):
    """Tokens of a prompt."""

    input_tokens: int


class ModelInfo(BaseModel):
    """The model that is served, by one of its names."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: datetime
    lifecycle: Literal["active"] = "active"
    max_input_tokens: int


class ModelInfoPage(BaseModel):
    """The model by each of its names, all of which fit on one page."""

    data: list[ModelInfo]
    has_more: Literal[False] = False
    first_id: str
    last_id: str
