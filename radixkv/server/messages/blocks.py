"""The content blocks of messages, and where a client asks for the prefix before a point to stay cached."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from radixkv.server.chat.messages import left_out
from radixkv.server.not_supported import Only
from radixkv.server.strict import StrictModel
from radixkv.server.unions import OneOf

MAX_BLOCKS = 4096


class CacheControl(StrictModel):
    """Keep the prompt up to here cached, for five minutes or an hour after its last use."""

    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = None
    scope: str | None = None  # "global": with other keys; here, they share nothing


class TextBlock(StrictModel):
    """Text."""

    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None
    citations: list[Any] | None = None  # of an answer of another server; not part of the prompt

    @property
    def pieces(self) -> list[Piece]:
        """Its text."""
        return [self.text]


# The texts of a block, and the marks within it, each behind what it keeps; the first one is a text. The block's own mark is
# none of them.
Piece = str | CacheControl


def _marked(texts: Sequence[TextBlock]) -> list[Piece]:
    """Texts, each before its mark."""
    return [piece for text in texts for piece in (text.text, text.cache_control) if piece is not None]


class ToolUseBlock(StrictModel):
    """A call of a tool by the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = None
    caller: Any = None
    toolset_name: Only[None] = None


class ImageBlock(StrictModel):
    """An image. In a tool's result, which its user cannot change, a note stands for it."""

    type: Literal["image"]
    source: dict[str, Any]
    transformations: Any = None
    cache_control: CacheControl | None = None

    @property
    def pieces(self) -> list[Piece]:
        """The note."""
        return [left_out(self.type)]


class PlainText(StrictModel):
    """A document's text."""

    type: Literal["text"]
    data: str
    media_type: Literal["text/plain"] | None = None


class TextParts(StrictModel):
    """A document's text in parts."""

    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]


def _kind_of_source(source: Any) -> str | None:
    """Which of `_Source` a document's source is meant to be; None: it has no type."""
    kind, parts = (source.get("type"), source.get("content")) if isinstance(source, dict) else ("", None)
    if kind is None:
        return None
    is_mixed = isinstance(parts, list) and any(
        isinstance(part, dict) and part.get("type") not in (None, "text") for part in parts
    )
    if kind == "text":
        return "plain text"
    return "text parts" if kind == "content" and not is_mixed else "no text"


# The tags are no names of fields: errors have them in their paths.
_Source = Annotated[
    Annotated[PlainText, Tag("plain text")]
    | Annotated[TextParts, Tag("text parts")]
    | Annotated[dict[str, Any], Tag("no text")],
    Discriminator(_kind_of_source),
]


class DocumentBlock(StrictModel):
    """A document. If it is no text, a note stands for it in a tool's result. Answers cite none."""

    type: Literal["document"]
    source: _Source
    title: str | None = None
    context: str | None = None
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    @property
    def is_text(self) -> bool:
        """Whether the model can read it."""
        return not isinstance(self.source, dict)

    @property
    def pieces(self) -> list[Piece]:
        """Its title, its context and what it says, or the note."""
        match self.source:
            case PlainText(data=text):
                texts: list[Piece] = [text]
            case TextParts(content=content):
                texts = [content] if isinstance(content, str) else _marked(content)
            case _:
                return [left_out(self.type)]
        return [*filter(None, (self.title, self.context)), *texts] or [""]


class SearchResultBlock(StrictModel):
    """What a client's search has found. Answers cite none."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=MAX_BLOCKS)]
    citations: dict[str, Any] | None = None
    cache_control: CacheControl | None = None

    @property
    def pieces(self) -> list[Piece]:
        """Its title, where it was found, and what it says."""
        return [self.title, self.source, *_marked(self.content)]


ResultPart = Annotated[TextBlock | ImageBlock | DocumentBlock | SearchResultBlock, OneOf("content blocks")]


class ToolResultBlock(StrictModel):
    """What a called tool returned."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ResultPart], Field(max_length=MAX_BLOCKS)] | None = None
    is_error: bool | None = None
    cache_control: CacheControl | None = None
    toolset_name: Only[None] = None

    @property
    def pieces(self) -> list[Piece]:
        """What it says, and that it is an error, with the marks of its parts."""
        opening = "Error: " if self.is_error else ""
        if not self.content or isinstance(self.content, str):
            return [f"{opening}{self.content or ''}"]
        first, *others = [piece for part in self.content for piece in (*part.pieces, part.cache_control)]
        return [f"{opening}{first}", *(piece for piece in others if piece is not None)]


class ThinkingBlock(StrictModel):
    """Reasoning of the assistant before its answer. The signature is not checked: clients may write a history."""

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
    TextBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock,
    OneOf("content blocks"),
]
