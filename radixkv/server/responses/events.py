"""The events of a streamed response."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from radixkv.server.responses.objects import OutputItem, OutputTextPart, ReasoningTextPart, ResponseObject


class StreamEvent(BaseModel):
    """Numbered from 0 on."""

    type: str
    sequence_number: int


class ResponseEvent(StreamEvent):
    """The response as a whole: at the beginning without output, at the end complete."""

    type: Literal[
        "response.created",
        "response.in_progress",
        "response.completed",
        "response.incomplete",
        "response.failed",
    ]
    response: ResponseObject


class ItemEvent(StreamEvent):
    """An item of the output begins, or is complete."""

    type: Literal["response.output_item.added", "response.output_item.done"]
    output_index: int
    item: OutputItem


class PartEvent(StreamEvent):
    """A part of an item begins, or is complete."""

    type: Literal["response.content_part.added", "response.content_part.done"]
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputTextPart | ReasoningTextPart


class TextDeltaEvent(StreamEvent):
    """More text."""

    type: Literal["response.output_text.delta"] = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[Any] = []


class TextDoneEvent(StreamEvent):
    """The text is complete."""

    type: Literal["response.output_text.done"] = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[Any] = []


class ReasoningDeltaEvent(StreamEvent):
    """More reasoning."""

    type: Literal["response.reasoning_text.delta"] = "response.reasoning_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str


class ReasoningDoneEvent(StreamEvent):
    """The reasoning is complete."""

    type: Literal["response.reasoning_text.done"] = "response.reasoning_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str


class ArgumentsDeltaEvent(StreamEvent):
    """More of a call's arguments."""

    type: Literal["response.function_call_arguments.delta"] = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str


class ArgumentsDoneEvent(StreamEvent):
    """A call's arguments are complete."""

    type: Literal["response.function_call_arguments.done"] = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str
