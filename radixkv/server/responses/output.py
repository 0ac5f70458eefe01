"""Turns the pieces of an answer into the items of a response's output and the events that announce them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

from radixkv.server.output.logprobs import EncodedTokenLogprobs
from radixkv.server.responses.events import (
    ArgumentsDeltaEvent,
    ArgumentsDoneEvent,
    ItemEvent,
    OutputEvent,
    PartEvent,
    ReasoningDeltaEvent,
    ReasoningDoneEvent,
    StreamEvent,
    TextDeltaEvent,
    TextDoneEvent,
)
from radixkv.server.responses.objects import (
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputTextPart,
    ReasoningTextPart,
    Status,
)
from radixkv.server.service import new_id
from radixkv.tools.pieces import AnswerPiece, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin

_E = TypeVar("_E", bound=OutputEvent)


class Output:
    """The output of one response as it grows: one item is open at a time.

    Each method yields the events of what it changes; they hold copies, so they may be written at any time.

    Args:
        namespaced: the namespace and the name of each function that is in a namespace, by its name in prompts.

    Attributes:
        items: those begun so far. What an item says is in it when it has ended.
    """

    def __init__(self, namespaced: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        self._namespaced = namespaced
        self.items: list[OutputItem] = []
        self._numbers = itertools.count()
        self._open = False
        # Of the open item.
        self._texts: list[str] = []
        self._logprobs: list[EncodedTokenLogprobs] = []

    def next_number(self) -> int:
        """The next event's ``sequence_number``."""
        return next(self._numbers)

    def add(self, piece: AnswerPiece, logprobs: EncodedTokenLogprobs | None = None) -> Iterator[StreamEvent]:
        """Add a piece to the open item, or end the item and begin another one.

        Args:
            logprobs: of a text's tokens; None: they are not included.
        """
        match piece:
            case TextPiece(text):
                yield from self._open_message()
                if logprobs is None:
                    yield self._delta(TextDeltaEvent, text)
                else:
                    self._logprobs.append(logprobs)
                    yield self._delta(TextDeltaEvent, text, logprobs=logprobs)
            case ReasoningPiece(text):
                yield from self._open_reasoning()
                yield self._delta(ReasoningDeltaEvent, text)
            case ToolCallBegin(_, call_id, qualified_name):
                namespace, name = self._namespaced.get(qualified_name, (None, qualified_name))
                call = OutputFunctionCall(
                    id=new_id("fc", "_"),
                    status="in_progress",
                    call_id=call_id,
                    name=name,
                    namespace=namespace,
                    arguments="",
                )
                yield from self._begin(call)
            case ToolCallArguments(_, text):
                yield self._delta(ArgumentsDeltaEvent, text)

    def end(self, status: Status, calls_required: bool = False) -> Iterator[StreamEvent]:
        """End the output; the open item gets this status. An answer without any piece is an empty message.

        Args:
            calls_required: the answer had to be calls, so that without any piece there is no message.
        """
        if not self.items and not calls_required:
            yield from self._open_message()
        yield from self._end_item(status)

    def _open_message(self) -> Iterator[StreamEvent]:
        """Begin a message, unless one is open."""
        if not (self._open and isinstance(self.items[-1], OutputMessage)):
            part = OutputTextPart(text="")
            yield from self._begin(OutputMessage(id=new_id("msg", "_"), status="in_progress", content=[part]), part)

    def _open_reasoning(self) -> Iterator[StreamEvent]:
        """Begin reasoning, unless some is open."""
        if not (self._open and isinstance(self.items[-1], OutputReasoning)):
            part = ReasoningTextPart(text="")
            yield from self._begin(OutputReasoning(id=new_id("rs", "_"), status="in_progress", content=[part]), part)

    def _begin(self, item: OutputItem, part: OutputTextPart | ReasoningTextPart | None = None) -> Iterator[StreamEvent]:
        """Begin an item, and its part if it has one, which is announced after it."""
        yield from self._end_item("completed")
        self.items.append(item)
        self._open = True
        self._texts, self._logprobs = [], []
        if part is None:
            yield self._item_event("response.output_item.added")
        else:
            yield self._item_event("response.output_item.added", content=[])
            yield self._event(PartEvent, type="response.content_part.added", item_id=item.id, part=part.model_copy())

    def _delta(self, event: type[_E], text: str, **fields: Any) -> _E:
        self._texts.append(text)
        return self._event(event, item_id=self.items[-1].id, delta=text, **fields)

    def _end_item(self, status: Status) -> Iterator[StreamEvent]:
        if not self._open:
            return
        self._open = False
        item, text = self.items[-1], "".join(self._texts)
        item.status = status
        if isinstance(item, OutputFunctionCall):
            item.arguments = text
            yield self._event(ArgumentsDoneEvent, item_id=item.id, name=item.name, arguments=text)
        else:
            (part,) = item.content
            part.text = text
            if isinstance(part, OutputTextPart):
                part.logprobs = EncodedTokenLogprobs.join(self._logprobs) if self._logprobs else []
                yield self._event(TextDoneEvent, item_id=item.id, text=text, logprobs=part.logprobs)
            else:
                yield self._event(ReasoningDoneEvent, item_id=item.id, text=text)
            yield self._event(PartEvent, type="response.content_part.done", item_id=item.id, part=part.model_copy())
        yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str, **changes: Any) -> ItemEvent:
        return self._event(ItemEvent, type=kind, item=self.items[-1].model_copy(update=changes, deep=True))

    def _event(self, event: type[_E], **fields: Any) -> _E:
        """An event of the last item."""
        return event(sequence_number=self.next_number(), output_index=len(self.items) - 1, **fields)
