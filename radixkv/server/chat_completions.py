"""`POST /v1/chat/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, SerializeAsAny
from typing_extensions import TypedDict

from radixkv.model.loader import LoadedModel
from radixkv.outputs import CompletionOutput
from radixkv.prompts import Message, Prompt, as_chat_prompts
from radixkv.server.authentication import CurrentTenant
from radixkv.server.cache_insight import CacheExplanation
from radixkv.server.chat_messages import Messages, as_messages
from radixkv.server.errors import client_errors
from radixkv.server.generation import Generation, respond
from radixkv.server.logprobs import ChatLogprobs, encode_chat_logprobs
from radixkv.server.not_supported import NotSupportedInChat
from radixkv.server.protocol import MAX_LOGPROBS, FinishReason, GenerationRequest, ResponseHead, Usage, finish_reason
from radixkv.server.service import Service, new_id


class ChatCompletionRequest(GenerationRequest, NotSupportedInChat):
    """A conversation to be continued by the assistant."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None

    # vLLM's extensions.
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    @property
    def request_field_names(self) -> dict[str, str]:
        names = {"prompts": "messages", "prompt_token_ids": "messages"}
        if self.max_completion_tokens is not None:
            names["max_tokens"] = "max_completion_tokens"
        return super().request_field_names | names

    def as_prompt(self, messages: list[Message], loaded: LoadedModel) -> Prompt:
        """The request's ``messages``, see `as_messages`, as the chat template writes them.

        Raises:
            TypeError, ValueError: the template refuses it, or it cannot be continued as asked.
        """
        (prompt,) = as_chat_prompts(
            messages,
            loaded,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=self.continue_final_message is True,
        )
        return prompt


class AssistantMessage(BaseModel):
    """The answer."""

    role: Literal["assistant"] = "assistant"
    content: str


class ChatChoice(BaseModel):
    """One answer."""

    index: int
    message: AssistantMessage
    logprobs: SerializeAsAny[ChatLogprobs] | None = None
    finish_reason: FinishReason | None
    stop_reason: int | str | None = None


class ChatCompletion(BaseModel):
    """The response."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    cache_explanation: CacheExplanation | None = None


class ChatDelta(TypedDict, total=False):
    """The new part of an answer; only the first one has the role."""

    role: Literal["assistant"]
    content: str


class ChatChunkChoice(BaseModel):
    """The new part of one answer."""

    index: int
    delta: ChatDelta
    logprobs: SerializeAsAny[ChatLogprobs] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class ChatCompletionChunk(BaseModel):
    """One chunk of a streamed response."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


def chat_completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/chat/completions", tags=["generation"], response_model=ChatCompletion)
    async def chat(body: ChatCompletionRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Answer a conversation."""
        service.check_model(body.model)
        with client_errors(body.request_field_names):
            if body.top_logprobs is not None and not body.logprobs:
                raise ValueError("top_logprobs: only for logprobs=true")
            messages = as_messages(body.messages)
            service.check_length("messages", *(message["content"] for message in messages))
            prompt = await service.llm.run_tokenizer(partial(body.as_prompt, messages))
            prompt = service.with_cache_options(prompt, body, tenant)
            params = body.params(
                body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
                body.top_logprobs or 0 if body.logprobs else None,
                None,
                service.remaining_tokens([prompt]),
            )
            request_id = new_id("chatcmpl")
            generation = await Generation.start(service, [prompt], params, body, request_id)
        writer = _ChatResponseWriter(body, request_id, service)
        return await respond(request, generation, writer, bool(body.stream))

    return router


class _ChatResponseWriter:
    """Writes one request's response."""

    def __init__(self, body: ChatCompletionRequest, request_id: str, service: Service) -> None:
        self._body = body
        self._texts = service.token_texts
        self._encoder = service.encoder
        self._head = ResponseHead(id=request_id, created=int(time.time()), model=service.model_name)

    async def full_response(self, generation: Generation) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=index,
                message=AssistantMessage(content=output.text),
                logprobs=await self._logprobs(output),
                finish_reason=finish_reason(output),
                stop_reason=output.stop_reason,
            )
            for index, output in enumerate(await generation.collect())
        ]
        explanation = None if generation.explanations is None else generation.explanations[0]
        return ChatCompletion(**self._head, choices=choices, usage=generation.usage, cache_explanation=explanation)

    async def chunks(self, generation: Generation) -> AsyncGenerator[ChatCompletionChunk, None]:
        started: set[int] = set()
        async with aclosing(aiter(generation)) as deltas:
            async for delta in deltas:
                output, logprobs = delta.output, await self._logprobs(delta.output)
                if delta.choice not in started:
                    started.add(delta.choice)
                    yield self._chunk(
                        ChatChunkChoice(index=delta.choice, delta=ChatDelta(role="assistant", content=""))
                    )
                if output.text or logprobs is not None or output.finish_reason is not None:
                    yield self._chunk(
                        ChatChunkChoice(
                            index=delta.choice,
                            delta=ChatDelta(content=output.text),
                            logprobs=logprobs,
                            finish_reason=finish_reason(output),
                            stop_reason=output.stop_reason,
                        )
                    )
        if self._body.includes_usage:
            yield ChatCompletionChunk(**self._head, choices=[], usage=generation.usage)

    def _chunk(self, choice: ChatChunkChoice) -> ChatCompletionChunk:
        return ChatCompletionChunk(**self._head, choices=[choice])

    async def _logprobs(self, output: CompletionOutput) -> ChatLogprobs | None:
        if output.logprobs is None:
            return None
        num_top = self._body.top_logprobs or 0
        write = partial(encode_chat_logprobs, output.token_ids, output.logprobs, num_top, self._texts)
        return await self._encoder.run(len(output.token_ids) * (1 + num_top), write)
