"""Messages as clients send them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from radixkv.prompts import Message, as_template_message
from radixkv.server.strict import StrictModel

# So that refusing a request takes little time; the model's length bounds what is accepted.
_MAX_MESSAGES = 4096


class TextPart(StrictModel):
    """A part of a message; parts that are not text are refused."""

    type: Literal["text"]
    text: str


class ChatMessage(StrictModel):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None

    # OpenAI's clients send answers back with these fields; they are always null here.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None


Messages = Annotated[list[ChatMessage], Field(max_length=_MAX_MESSAGES)]


def as_messages(messages: list[ChatMessage]) -> list[Message]:
    """Messages in the form that chat templates expect."""
    return [as_template_message(message.model_dump(include={"role", "content"})) for message in messages]
