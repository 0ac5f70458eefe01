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


class PartEvent(OutputEvent):
    """A part of an item begins, or is complete. Each item has one part at most."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    content_index: int = 0
    part: OutputTextPart | ReasoningTextPart


class TextDeltaEvent(OutputEvent):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    item_id: str
    content_index: int = 0
    delta: str
    logprobs: Logprobs = []


class TextDoneEvent(OutputEvent):
    """The text is complete."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    item_id: str
    content_index: int = 0
    text: str
    logprobs: Logprobs = []


class ReasoningDeltaEvent(OutputEvent):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    item_id: str
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(OutputEvent):
    """The reasoning is complete."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    item_id: str
    content_index: int = 0
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
