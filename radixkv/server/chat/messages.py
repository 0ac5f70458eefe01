"""Messages as clients send them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from radixkv.prompts import Message
from radixkv.server.chat.prompt_caching import IgnoredCacheControl, PromptCacheBreakpoint
from radixkv.server.chat.tool_protocol import EarlierToolCall
from radixkv.server.strict import StrictModel
from radixkv.server.unions import OneOf

# So that refusing a request takes little time; the model's length bounds what is accepted.
_MAX_MESSAGES = 4096


def left_out(kind: str) -> str:
    """The note that takes the place in a prompt of what a tool returned and the model cannot read, such as an image."""
    return f"[{kind} left out: this model reads text only]"


class TextPart(StrictModel):
    """A part of a message; parts that are not text are refused."""

    type: Literal["text"]
    text: str
    cache_control: IgnoredCacheControl | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class RefusalPart(StrictModel):
    """An assistant's refusal, from a history that another server wrote."""

    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        """The refusal."""
        return self.refusal


class ThinkingPart(StrictModel):
    """Reasoning of the assistant, as LiteLLM sends what it got from Anthropic's clients."""

    type: Literal["thinking"]
    thinking: str
    signature: str | None = None

    @property
    def text(self) -> str:
        """The reasoning."""
        return self.thinking


class RedactedThinkingPart(StrictModel):
    """Thinking that another server encrypted; it is left out of the prompt."""

    type: Literal["redacted_thinking"]
    data: str

    @property
    def text(self) -> str:
        """None."""
        return ""


ContentPart = Annotated[TextPart | RefusalPart, OneOf("parts")]
MessagePart = Annotated[TextPart | RefusalPart | ThinkingPart | RedactedThinkingPart, OneOf("parts")]


class ChatMessage(StrictModel):
    """One message of a conversation.

    Attributes:
        content: may be null where there are tool calls or a refusal.
        refusal: of an assistant's message: what it said instead of an answer; read as its content.
        reasoning_content: of an assistant's message: its reasoning, for templates that write it.
        reasoning: vLLM's name of the same.
        tool_calls: of an assistant's message: the tools that it called.
        tool_call_id: of a tool's message: the call whose result it is.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[MessagePart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[EarlierToolCall] | None = None
    tool_call_id: str | None = None

    # OpenAI's clients send answers back with these fields.
    refusal: str | None = None
    annotations: list[dict[str, Any]] | None = None  # not part of what the model reads
    type: Literal["message"] | None = None
    audio: None = None
    function_call: None = None
    parsed: Any = Field(default=None, exclude=True)  # what OpenAI's client made of the content
    # And LiteLLM, and clients of OpenRouter; what the model may read of it is also in the fields above.
    provider_specific_fields: Any = Field(default=None, exclude=True)
    thinking_blocks: Any = Field(default=None, exclude=True)
    reasoning_details: Any = Field(default=None, exclude=True)
    cache_control: IgnoredCacheControl | None = Field(default=None, exclude=True)

    @property
    def _written(self) -> list[str]:
        """The texts of the content and the refusal."""
        content = self.content
        parts = [content] if isinstance(content, str) else [part.text for part in content or []]
        return parts if self.refusal is None else [*parts, self.refusal]

    @property
    def texts(self) -> list[str]:
        """All text that a template may write."""
        calls = [
            text
            for call in self.tool_calls or []
            for text in (f"{call.id}{call.function.name}", call.function.arguments)
        ]
        reasoning = self.reasoning if self.reasoning_content is None else self.reasoning_content
        return [*self._written, *calls, "".join(filter(None, (reasoning, self.name, self.tool_call_id)))]


# An empty list is not refused here but by `LLM.chat`'s check, with its message.
Messages = Annotated[list[ChatMessage], Field(max_length=_MAX_MESSAGES, json_schema_extra={"minItems": 1})]


def as_messages(messages: list[ChatMessage]) -> list[Message]:
    """Messages in the form of `radixkv.prompts`, which says what of them a chat template is given."""
    return [message.model_dump() for message in messages]
