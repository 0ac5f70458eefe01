"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from functools import partial
from typing import Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, SerializeAsAny
from typing_extensions import TypedDict

from radixkv.outputs import CompletionOutput
from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.chat.events import ChatEvent, ChatEvents, ChatFinishReason, start_chat
from radixkv.server.chat.request import ChatCompletionRequest
from radixkv.server.chat.tool_protocol import AssistantToolCall, FunctionCall, FunctionCallDelta, ToolCallDelta
from radixkv.server.operation.explanations import CacheExplanation
from radixkv.server.output.logprobs import (
    ChatLogprobs,
    EncodedPromptLogprobs,
    encode_chat_logprobs,
    encode_prompt_logprobs,
)
from radixkv.server.output.respond import cancel_on_disconnect, respond
from radixkv.server.protocol import ResponseHead, Usage
from radixkv.server.service import Service, new_id, response_id
from radixkv.tools.pieces import AnswerPiece, ParsedAnswer, ReasoningPiece, TextPiece, ToolCallArguments, ToolCallBegin


class AssistantMessage(BaseModel):
    """The answer; ``content`` is null, rather than empty, where there are tool calls, or should have been.

    Reasoning has two names: ``reasoning`` is vLLM's, ``reasoning_content`` DeepSeek's and formerly vLLM's.
    """

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[AssistantToolCall] | None = None

    @classmethod
    def of(cls, pieces: Iterable[AnswerPiece], calls_required: bool) -> AssistantMessage:
        """The message that consists of these pieces.

        Args:
            calls_required: whether it had to be calls.
        """
        answer = ParsedAnswer.of(pieces)
        calls = [
            AssistantToolCall(id=call.id, function=FunctionCall(name=call.name, arguments=call.arguments))
            for call in answer.tool_calls
        ]
        content = answer.text or None if calls or calls_required else answer.text
        reasoning = answer.reasoning
        return cls(content=content, reasoning=reasoning, reasoning_content=reasoning, tool_calls=calls or None)


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: SerializeAsAny[ChatLogprobs] | None = None
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # only where they were asked for


class ChatCompletion(BaseModel):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    cache_explanation: CacheExplanation | None = None
    # Only where they were asked for.
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: EncodedPromptLogprobs | None = None


class ChatDelta(TypedDict, total=False):
    """The new part of an answer; only the first one has the role. Reasoning has the names of `AssistantMessage`."""

    role: Literal["assistant"]
    content: str
    reasoning: str
    reasoning_content: str
    tool_calls: list[ToolCallDelta]


class ChatChunkChoice(BaseModel):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: SerializeAsAny[ChatLogprobs] | None = None
    finish_reason: ChatFinishReason | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None  # only where they were asked for


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None  # in the first one, where they were asked for


def chat_completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion)
    async def chat(body: ChatCompletionRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        request_id = new_id("chatcmpl")
        events = await cancel_on_disconnect(request, start_chat(service, body, tenant, request_id))
        return await respond(request, events, _ChatResponseWriter(body, request_id, service), bool(body.stream))

    return router


class _ChatResponseWriter:
    """Writes one request's response."""

    def __init__(self, body: ChatCompletionRequest, request_id: str, service: Service) -> None:
        self._body = body
        self._texts = service.token_texts
        self._encoder = service.encoder
        self._head = ResponseHead(id=response_id(request_id, body), created=int(time.time()), model=service.model_name)

    async def full_response(self, events: ChatEvents) -> ChatCompletion:
        choices = [await self._choice(whole, events.calls_required) for whole in await events.collect()]
        generation = events.generation
        return ChatCompletion(
            **self._head,
            choices=choices,
            usage=events.usage,
            cache_explanation=generation.explanations[0] if generation.explanations else None,
            prompt_token_ids=self._prompt_token_ids(events),
            prompt_logprobs=await encode_prompt_logprobs(
                self._encoder, generation.prompt_logprobs(0), self._body.prompt_logprobs
            ),
        )

    async def chunks(self, events: ChatEvents) -> AsyncGenerator[ChatCompletionChunk, None]:
        started: set[int] = set()
        async with aclosing(aiter(events)) as parts:
            async for event in parts:
                if event.choice not in started:
                    started.add(event.choice)
                    first = ChatDelta(role="assistant", content="")
                    choice = ChatChunkChoice(index=event.choice, delta=first)
                    yield self._chunk(choice, events, self._prompt_token_ids(events))
                logprobs = await self._logprobs(event.output)
                deltas = _deltas(event)
                token_ids = event.output.token_ids if self._body.return_token_ids else None
                if logprobs is None and event.finish_reason is None and not deltas and not token_ids:
                    continue
                *earlier, last = deltas or [ChatDelta(content="")]
                for delta in earlier:
                    yield self._chunk(ChatChunkChoice(index=event.choice, delta=delta), events)
                yield self._chunk(
                    ChatChunkChoice(
                        index=event.choice,
                        delta=last,
                        logprobs=logprobs,
                        finish_reason=event.finish_reason,
                        stop_reason=event.output.stop_reason,
                        token_ids=token_ids,
                    ),
                    events,
                )
        if self._body.includes_usage:
            yield ChatCompletionChunk(**self._head, choices=[], usage=events.usage)

    async def _choice(self, whole: ChatEvent, calls_required: bool) -> ChatChoice:
        return ChatChoice(
            index=whole.choice,
            message=AssistantMessage.of(whole.pieces, calls_required),
            logprobs=await self._logprobs(whole.output),
            finish_reason=whole.finish_reason,
            stop_reason=whole.output.stop_reason,
            token_ids=whole.output.token_ids if self._body.return_token_ids else None,
        )

    def _prompt_token_ids(self, events: ChatEvents) -> list[int] | None:
        """The prompt as the chat template wrote it; None: the request did not ask for it."""
        return list(events.generation.prompts[0].token_ids) if self._body.return_token_ids else None

    def _chunk(
        self, choice: ChatChunkChoice, events: ChatEvents, prompt_token_ids: list[int] | None = None
    ) -> ChatCompletionChunk:
        usage = events.usage if self._body.includes_usage_in_every_chunk else None
        return ChatCompletionChunk(**self._head, choices=[choice], usage=usage, prompt_token_ids=prompt_token_ids)

    async def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        num_top = self._body.top_logprobs or 0
        write = partial(encode_chat_logprobs, output.token_ids, output.logprobs, num_top, self._texts)
        return await self._encoder.run(len(output.token_ids) * (1 + num_top), write)


def _deltas(event: ChatEvent) -> list[ChatDelta]:
    """The event in OpenAI's form: one delta for each piece."""
    deltas: list[ChatDelta] = []
    for piece in event.pieces:
        match piece:
            case TextPiece(text):
                deltas.append(ChatDelta(content=text))
            case ReasoningPiece(text):
                deltas.append(ChatDelta(reasoning=text, reasoning_content=text))
            case ToolCallBegin(index, call_id, name):
                function = FunctionCallDelta(name=name, arguments="")
                call = ToolCallDelta(index=index, id=call_id, type="function", function=function)
                deltas.append(ChatDelta(tool_calls=[call]))
            case ToolCallArguments(index, text):
                call = ToolCallDelta(index=index, function=FunctionCallDelta(arguments=text))
                deltas.append(ChatDelta(tool_calls=[call]))
    return deltas
