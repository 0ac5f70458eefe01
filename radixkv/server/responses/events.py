"""The events of a streamed response."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from radixkv.server.responses.objects import Logprobs, OutputItem, OutputTextPart, ReasoningTextPart, ResponseObject

ResponseEventType = Literal[
    "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed"
]


class StreamEvent(BaseModel):
    """Numbered from 0 on."""

    type: str
    sequence_number: int


class ResponseEvent(StreamEvent):
    """The response as a whole: at the beginning without output, at the end complete."""

    type: ResponseEventType
    response: ResponseObject


class OutputEvent(StreamEvent):
    """Something of one item of the output."""

    output_index: int


class ItemEvent(OutputEvent):
    """An item begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    item: OutputItem


class ContentEvent(OutputEvent):
    """Something of a part of an item. Each item has one part at most."""

    item_id: str
    content_index: int = 0


class PartEvent(ContentEvent):
    """A part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    part: OutputTextPart | ReasoningTextPart


class TextDeltaEvent(ContentEvent):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    delta: str
    logprobs: Logprobs = []


class TextDoneEvent(ContentEvent):
    """The text is complete."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    text: str
    logprobs: Logprobs = []


class ReasoningDeltaEvent(ContentEvent):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    delta: str


class ReasoningDoneEvent(ContentEvent):
    """The reasoning is complete."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    text: str


class ArgumentsDeltaEvent(OutputEvent):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    delta: str


class ArgumentsDoneEvent(OutputEvent):
    """A call's arguments are complete."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    name: str
    arguments: str
