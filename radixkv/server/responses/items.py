"""The items of a request's ``input``: messages, calls of functions, their results, and reasoning."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AliasChoices, Field

from radixkv.server.chat.messages import RefusalPart, left_out
from radixkv.server.chat.prompt_caching import PromptCacheBreakpoint
from radixkv.server.not_supported import Only
from radixkv.server.strict import StrictModel
from radixkv.server.unions import OneOf

MAX_ITEMS = 4096

_Status = Literal["in_progress", "completed", "incomplete"]


class InputText(StrictModel):
    """Text from the user, or from the developer."""

    type: Literal["input_text", "text"]
    text: str
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None


class InputImage(StrictModel):
    """An image that a function returned. The user cannot take it back, so a note stands for it."""

    type: Literal["input_image"]
    image_url: str | None = None
    file_id: str | None = None
    detail: str | None = None
    prompt_cache_breakpoint: PromptCacheBreakpoint | None = None

    @property
    def text(self) -> str:
        """The note."""
        return left_out("image")


class OutputText(StrictModel):
    """Text from the assistant, as it was returned."""

    type: Literal["output_text"]
    text: str
    # Of another server, and what OpenAI's client made of the text; none is part of the prompt.
    annotations: Any = Field(default=None, exclude=True)
    logprobs: Any = Field(default=None, exclude=True)
    parsed: Any = Field(default=None, exclude=True)


class ReasoningText(StrictModel):
    """A piece of reasoning."""

    type: Literal["reasoning_text", "text"]
    text: str


class SummaryText(StrictModel):
    """A piece of a summary of reasoning."""

    type: Literal["summary_text"]
    text: str


Part = Annotated[InputText | OutputText | RefusalPart, OneOf("parts")]
ResultPart = Annotated[InputText | InputImage, OneOf("parts")]

_Part = TypeVar("_Part")


def _as_parts(content: str | Sequence[_Part]) -> Sequence[_Part | InputText]:
    return [InputText(type="text", text=content)] if isinstance(content, str) else content


class MessageItem(StrictModel):
    """A message of any role."""

    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[Part], Field(max_length=MAX_ITEMS)]
    id: str | None = None
    status: _Status | None = None
    phase: str | None = None

    @property
    def parts(self) -> Sequence[Part]:
        """The content; one part where it is one text."""
        return _as_parts(self.content)


class FunctionCallItem(StrictModel):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Only[None] = None
    # Without its alias OpenAI's client writes "async" as "async_".
    asynchronous: Only[Literal[False] | None] = Field(default=None, validation_alias=AliasChoices("async", "async_"))
    parsed_arguments: Any = Field(default=None, exclude=True)  # what OpenAI's client made of them


class FunctionCallOutputItem(StrictModel):
    """What a called function returned; without a ``call_id``, what an agent adds without having been called."""

    type: Literal["function_call_output"]
    call_id: str | None = None
    output: str | Annotated[list[ResultPart], Field(max_length=MAX_ITEMS)]
    id: str | None = None
    name: str | None = None
    status: _Status | None = None
    namespace: str | None = None
    caller: Only[None] = None

    @property
    def parts(self) -> Sequence[ResultPart]:
        """The output; one part where it is one text."""
        return _as_parts(self.output)


class ReasoningItem(StrictModel):
    """The assistant's reasoning before a message or a call; a summary counts only where there is no content."""

    type: Literal["reasoning"]
    id: str | None = None
    summary: Annotated[list[SummaryText], Field(max_length=MAX_ITEMS)] | None = None
    content: Annotated[list[ReasoningText], Field(max_length=MAX_ITEMS)] | None = None
    encrypted_content: str | None = None  # of another server, which alone can read it; left out of the prompt
    status: _Status | None = None


class ItemReference(StrictModel):
    """An item of the output of a response that is stored, by its id."""

    type: Literal["item_reference"]
    id: str


InputItem = Annotated[
    MessageItem | FunctionCallItem | FunctionCallOutputItem | ReasoningItem | ItemReference,
    OneOf("items", default="message"),
]
