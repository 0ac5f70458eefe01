"""Writes one message, whole or as events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pydantic import BaseModel

from radixkv.server.chat.events import ChatEvent, ChatEvents
from radixkv.server.chat.prompt_caching import SECONDS
from radixkv.server.errors import as_api_error
from radixkv.server.messages.errors import as_messages_error
from radixkv.server.messages.objects import CacheCreation, MessageObject, MessageUsage, OutputTokensDetails
from radixkv.server.messages.output import MessageContent, MessageDelta, MessageStart, MessageStop, Ping, StopDelta


class MessageWriter:
    """Writes the answer to one request.

    Args:
        shows_thinking: see `MessageContent`.
    """

    def __init__(self, message_id: str, model_name: str, *, shows_thinking: bool) -> None:
        self._id = message_id
        self._model_name = model_name
        self._content = MessageContent(shows_thinking=shows_thinking)
        self._stop = StopDelta(stop_reason=None, stop_sequence=None)

    async def full_response(self, events: ChatEvents) -> MessageObject:
        """The whole message."""
        async with aclosing(self._grow(events)) as stream:
            async for _ in stream:
                pass
        return self._message(events)

    async def chunks(self, events: ChatEvents) -> AsyncGenerator[BaseModel, None]:
        """The message's events. The first ones come when the prompt is computed: they have how much of it was cached."""
        try:
            async with aclosing(self._grow(events)) as stream:
                async for event in stream:
                    yield event
        except Exception as error:
            # The status was sent long ago, so a failure is an event.
            failure = as_api_error(error)
            yield as_messages_error(failure.status, failure.body.error.message)

    async def _grow(self, events: ChatEvents) -> AsyncGenerator[BaseModel, None]:
        last: ChatEvent | None = None
        async with aclosing(aiter(events)) as parts:
            async for part in parts:
                if last is None:
                    await events.wait_until_kept()  # the first event has the number of tokens
                    yield MessageStart(message=self._message(events))
                    yield Ping()
                last = part
                for piece in part.pieces:
                    for event in self._content.add(piece):
                        yield event
        for event in self._content.end():
            yield event
        assert last is not None
        self._stop = _stop(last)
        yield MessageDelta(delta=self._stop, usage=self._usage(events))
        yield MessageStop()

    def _message(self, events: ChatEvents) -> MessageObject:
        return MessageObject(
            id=self._id,
            model=self._model_name,
            content=self._content.blocks,
            stop_reason=self._stop.stop_reason,
            stop_sequence=self._stop.stop_sequence,
            usage=self._usage(events),
        )

    def _usage(self, events: ChatEvents) -> MessageUsage:
        usage = events.usage
        cached = usage.prompt_tokens_details.cached_tokens
        created_for_hour, created_for_minutes = (events.num_written.get(SECONDS[ttl], 0) for ttl in ("1h", "5m"))
        created = created_for_hour + created_for_minutes
        return MessageUsage(
            input_tokens=usage.prompt_tokens - cached - created,
            cache_creation_input_tokens=created,
            cache_read_input_tokens=cached,
            cache_creation=CacheCreation(
                ephemeral_5m_input_tokens=created_for_minutes, ephemeral_1h_input_tokens=created_for_hour
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(thinking_tokens=usage.completion_tokens_details.reasoning_tokens),
        )


def _stop(last: ChatEvent) -> StopDelta:
    """Why the message ended."""
    if last.finish_reason == "length":
        return StopDelta(stop_reason="max_tokens", stop_sequence=None)
    if last.finish_reason == "tool_calls":
        return StopDelta(stop_reason="tool_use", stop_sequence=None)
    if isinstance(last.output.stop_reason, str):
        return StopDelta(stop_reason="stop_sequence", stop_sequence=last.output.stop_reason)
    return StopDelta(stop_reason="end_turn", stop_sequence=None)
