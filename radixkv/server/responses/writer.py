"""Writes one response, whole or as events, and hands it on to be stored."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from radixkv.sampling_defaults import SamplingDefaults
from radixkv.server.chat.answer_tokens import LocatedPiece
from radixkv.server.chat.events import ChatEvents
from radixkv.server.errors import as_api_error
from radixkv.server.output.logprobs import EncodedTokenLogprobs, encode_token_logprobs
from radixkv.server.responses.events import ResponseEvent, ResponseEventType, StreamEvent
from radixkv.server.responses.objects import (
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    ResponseFailure,
    ResponseObject,
    ResponseUsage,
)
from radixkv.server.responses.output import Output
from radixkv.server.responses.request import AllowedFunctions, NamedFunction, ResponseRequest
from radixkv.server.responses.store import PendingResponse
from radixkv.server.responses.translation import namespaced_functions, output_messages
from radixkv.server.service import Service
from radixkv.tools.pieces import TextPiece


class ResponsesWriter:
    """Writes the response to one request, and stores it, unless the request forbids it.

    Args:
        pending: the store's note of it.
    """

    def __init__(self, body: ResponseRequest, response_id: str, service: Service, pending: PendingResponse) -> None:
        self._body = body
        self._store = service.responses
        self._texts = service.token_texts
        self._encoder = service.encoder
        self._pending = pending
        self._response = _head(body, response_id, service.model_name, service.llm.loaded.sampling_defaults)
        self._output = Output(namespaced_functions(body))

    async def full_response(self, events: ChatEvents) -> ResponseObject:
        """The finished response; it is stored."""
        async with aclosing(self._grow(events)) as stream:
            async for _ in stream:
                pass
        return self._response

    async def chunks(self, events: ChatEvents) -> AsyncGenerator[StreamEvent, None]:
        """The response's events; it is stored before the last one, unless it failed."""
        yield self._response_event("response.created")
        yield self._response_event("response.in_progress")
        try:
            async with aclosing(self._grow(events)) as stream:
                async for event in stream:
                    yield event
        except Exception as error:
            # The status was sent long ago, so a failure is an event.
            failure = as_api_error(error)
            if self._output.items:
                for event in self._output.end("incomplete"):
                    yield event
            self._response.status = "failed"
            self._response.output = self._output.items
            self._response.error = ResponseFailure(
                code="server_error" if failure.status >= 500 else "invalid_prompt", message=failure.body.error.message
            )
            yield self._response_event("response.failed")
            return
        yield self._response_event(
            "response.incomplete" if self._response.status == "incomplete" else "response.completed"
        )

    async def _grow(self, events: ChatEvents) -> AsyncGenerator[StreamEvent, None]:
        """The events of the output; at the end the response is complete and stored."""
        output, truncated = self._output, False
        async with aclosing(aiter(events)) as parts:
            async for part in parts:
                truncated = part.finish_reason == "length"
                for located in part.located:
                    for event in output.add(located.piece, await self._logprobs(located)):
                        yield event
        for event in output.end("incomplete" if truncated else "completed", events.calls_required):
            yield event
        response = self._response
        response.status = "incomplete" if truncated else "completed"
        response.completed_at = None if truncated else int(time.time())
        response.incomplete_details = IncompleteDetails(reason="max_output_tokens") if truncated else None
        response.output = output.items
        usage = events.usage
        response.usage = ResponseUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(
                cached_tokens=usage.prompt_tokens_details.cached_tokens,
                cache_write_tokens=usage.prompt_tokens_details.cache_write_tokens or 0,
            ),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(
                reasoning_tokens=usage.completion_tokens_details.reasoning_tokens
            ),
            total_tokens=usage.total_tokens,
        )
        if response.store:
            # Measured as Python stores strings: one character beyond Latin-1 makes all of a string two or four bytes wide.
            # Each breakpoint may hold the input's texts once more.
            num_inputs = 1 + len(self._pending.breakpoints)
            own = num_inputs * sys.getsizeof(self._body.model_dump_json())
            own += sys.getsizeof(
                response.model_dump_json(exclude={"output": {"__all__": {"content": {"__all__": {"logprobs"}}}}})
            )
            self._store.finish(self._pending, response, output_messages(output.items), own)

    async def _logprobs(self, located: LocatedPiece) -> EncodedTokenLogprobs | None:
        """Of a text's tokens; None where they are not included."""
        num_top = self._body.num_top_logprobs
        if num_top is None or not isinstance(located.piece, TextPiece):
            return None
        chosen = [(token.token_id, token.logprobs) for token in located.tokens]
        write = partial(encode_token_logprobs, chosen, num_top, self._texts)
        return await self._encoder.run(len(chosen) * (1 + num_top), write)

    def _response_event(self, kind: ResponseEventType) -> ResponseEvent:
        number = self._output.next_number()
        return ResponseEvent(type=kind, sequence_number=number, response=self._response.model_copy())


def _head(body: ResponseRequest, response_id: str, model_name: str, defaults: SamplingDefaults) -> ResponseObject:
    """The response before it has any output."""
    choice: Any = body.tool_choice or "auto"
    if isinstance(choice, NamedFunction | AllowedFunctions):
        choice = choice.model_dump()
    text = {} if body.text is None else body.text.model_dump(by_alias=True, exclude_none=True)
    caching = None
    if body.prompt_cache_options is not None:
        caching = {"mode": "implicit", "ttl": "30m"} | body.prompt_cache_options.model_dump(exclude_none=True)
    return ResponseObject(
        id=response_id,
        created_at=int(time.time()),
        status="in_progress",
        model=model_name,
        output=[],
        previous_response_id=body.previous_response_id,
        instructions=body.instructions,
        tools=[tool.model_dump(by_alias=True) for tool in body.tools or []],
        tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls is not False,
        text={"format": {"type": "text"}} | text,
        reasoning={"effort": None, "summary": None}
        | ({} if body.reasoning is None else body.reasoning.model_dump(exclude_none=True)),
        max_output_tokens=body.max_output_tokens,
        top_logprobs=body.top_logprobs or 0,
        temperature=defaults.get("temperature", 1.0) if body.temperature is None else body.temperature,
        top_p=defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        truncation=body.truncation or "disabled",
        store=body.store is not False,
        prompt_cache_key=body.prompt_cache_key,
        prompt_cache_options=caching,
        safety_identifier=body.safety_identifier,
        metadata=body.metadata or {},
        user=body.user,
    )
