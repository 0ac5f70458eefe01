"""Turns the pieces of an answer into the items of a response's output and the events that announce them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Generator, Iterator, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

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

_I = TypeVar("_I", OutputMessage, OutputReasoning)
_E = TypeVar("_E", bound=OutputEvent)


class Output:
    """The output of one response as it grows: one item is open at a time.

    Each method yields the events of what it changes; they hold copies, so they may be written at any time.

    Args:
        namespaced: the namespace and the name of each function that is in a namespace, by the name that the model knows.

    Attributes:
        items: those begun so far.
    """

    def __init__(self, namespaced: Mapping[str, tuple[str, str]] = MappingProxyType({})) -> None:
        self._namespaced = namespaced
        self.items: list[OutputItem] = []
        self._numbers = itertools.count()
        self._open = False

    def next_number(self) -> int:
        """The next event's ``sequence_number``."""
        return next(self._numbers)

    def add(self, piece: AnswerPiece) -> Iterator[StreamEvent]:
        """Add a piece to the open item, or end the item and begin another one."""
        match piece:
            case TextPiece(text):
                yield from self._add_text(text)
            case ReasoningPiece(text):
                yield from self._add_reasoning(text)
            case ToolCallBegin(_, call_id, known_name):
                namespace, name = self._namespaced.get(known_name, (None, known_name))
                yield from self._begin(
                    OutputFunctionCall(
                        id=new_id("fc", "_"),
                        status="in_progress",
                        call_id=call_id,
                        name=name,
                        namespace=namespace,
                        arguments="",
                    )
                )
            case ToolCallArguments(_, text):
                call = self.items[-1]
                assert isinstance(call, OutputFunctionCall)
                call.arguments += text
                yield self._event(ArgumentsDeltaEvent, item_id=call.id, delta=text)

    def end(self, status: Status, calls_required: bool = False) -> Iterator[StreamEvent]:
        """End the output; the open item gets this status. An answer without any piece is an empty message.

        Args:
            calls_required: the answer had to be calls, so that without any piece there is no message.
        """
        if not self.items and not calls_required:
            yield from self._add_text("")
        yield from self._end_item(status)

    def _add_text(self, text: str) -> Iterator[StreamEvent]:
        message = yield from self._opened(OutputMessage, _empty_message)
        if text:
            message.content[0].text += text
            yield self._event(TextDeltaEvent, item_id=message.id, delta=text)

    def _add_reasoning(self, text: str) -> Iterator[StreamEvent]:
        item = yield from self._opened(OutputReasoning, _empty_reasoning)
        item.content[0].text += text
        yield self._event(ReasoningDeltaEvent, item_id=item.id, delta=text)

    def _opened(self, kind: type[_I], make_empty: Callable[[], _I]) -> Generator[StreamEvent, None, _I]:
        """The open item if it is of this kind, else a new one; its part is announced after it."""
        last = self.items[-1] if self._open else None
        if isinstance(last, kind):
            return last
        item = make_empty()
        part = item.content.pop()
        yield from self._begin(item)
        yield self._event(PartEvent, type="response.content_part.added", item_id=item.id, part=part.model_copy())
        item.content.append(part)
        return item

    def _begin(self, item: OutputItem) -> Iterator[StreamEvent]:
        yield from self._end_item("completed")
        self.items.append(item)
        self._open = True
        yield self._item_event("response.output_item.added")

    def _end_item(self, status: Status) -> Iterator[StreamEvent]:
        if not self._open:
            return
        self._open = False
        item = self.items[-1]
        item.status = status
        if isinstance(item, OutputFunctionCall):
            yield self._event(ArgumentsDoneEvent, item_id=item.id, name=item.name, arguments=item.arguments)
        else:
            (part,) = item.content
            done = TextDoneEvent if isinstance(item, OutputMessage) else ReasoningDoneEvent
            yield self._event(done, item_id=item.id, text=part.text)
            yield self._event(PartEvent, type="response.content_part.done", item_id=item.id, part=part.model_copy())
        yield self._item_event("response.output_item.done")

    def _item_event(self, kind: str) -> ItemEvent:
        return self._event(ItemEvent, type=kind, item=self.items[-1].model_copy(deep=True))

    def _event(self, event: type[_E], **fields: Any) -> _E:
        """An event of the last item."""
        return event(sequence_number=self.next_number(), output_index=len(self.items) - 1, **fields)


def _empty_message() -> OutputMessage:
    return OutputMessage(id=new_id("msg", "_"), status="in_progress", content=[OutputTextPart(text="")])


def _empty_reasoning() -> OutputReasoning:
    return OutputReasoning(id=new_id("rs", "_"), status="in_progress", content=[ReasoningTextPart(text="")])
