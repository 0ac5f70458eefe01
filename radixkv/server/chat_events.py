"""The answers to one chat request as events: the seam between the engine and the forms in which clients read answers.

::

    /v1/chat/completions --.                                            .-> chunks of /v1/chat/completions
    another form of request +-> ChatCompletionRequest -> start_chat ->--+-> events of another form
                                                          ChatEvents
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Literal

from radixkv.outputs import CompletionOutput
from radixkv.server.cache_insight import CacheExplanation
from radixkv.server.chat_messages import as_messages
from radixkv.server.chat_request import ChatCompletionRequest
from radixkv.server.errors import client_errors
from radixkv.server.generation import Generation
from radixkv.server.protocol import Usage, finish_reason
from radixkv.server.service import Service
from radixkv.server.tenants import Tenant
from radixkv.tools.definitions import ParsedAnswer
from radixkv.tools.events import AnswerPiece, TextPiece

ChatFinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class ChatEvent:
    """What is new in one choice.

    Attributes:
        choice: index of the choice.
        pieces: new text, reasoning and parts of tool calls, in order; may be empty.
        output: the new tokens and their log-probabilities; its text is what the model wrote, markers included.
        finish_reason: why the choice ended; None while it has not.
        stop_reason: the stop string or token id that ended it.
    """

    choice: int
    pieces: list[AnswerPiece]
    output: CompletionOutput
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One whole choice; the attributes are those of `ChatEvent`."""

    choice: int
    answer: ParsedAnswer
    output: CompletionOutput
    finish_reason: ChatFinishReason | None
    stop_reason: int | str | None


async def start_chat(service: Service, body: ChatCompletionRequest, tenant: Tenant, request_id: str) -> ChatEvents:
    """Check a request, write its prompt and submit it.

    Args:
        request_id: unique among the unfinished requests; see `new_id`.

    Returns:
        The events to come. Iterate them once to the end, or collect them, or close them.

    Raises:
        ApiError: a value is impossible: 400, with the name of the field.
        Exception: what `AsyncLLM.submit` raises.
    """
    with client_errors(body.request_field_names):
        if body.top_logprobs is not None and not body.logprobs:
            raise ValueError("top_logprobs: only for logprobs=true")
        if body.tools or body.chat_template_kwargs or body.reasoning_effort is not None:
            raise ValueError("tools: not supported yet, nor chat_template_kwargs and reasoning_effort")
        messages = as_messages(body.messages)
        service.check_length("messages", *(text for message in body.messages for text in message.texts))
        prompt = await service.llm.run_tokenizer(partial(body.as_prompt, messages))
        prompt = service.with_cache_options(prompt, body, tenant)
        params = body.params(
            body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            body.top_logprobs or 0 if body.logprobs else None,
            None,
            service.remaining_tokens([prompt]),
        )
        return ChatEvents(await Generation.start(service, [prompt], params, body, request_id))


class ChatEvents:
    """The answers to one chat request. Iterate it once, to the end, or `collect` it, or call `close`."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        return self._generation.usage

    @property
    def request_id(self) -> str:
        """The id of the request."""
        return self._generation.request_id

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds to the first token; None: there is none yet."""
        return self._generation.first_token_seconds

    @property
    def complete(self) -> bool:
        """Whether all choices have ended by themselves."""
        return self._generation.complete

    @property
    def cache_explanation(self) -> CacheExplanation | None:
        """Why not more of the prompt was reused; None unless the request asked for it."""
        explanations = self._generation.explanations
        return None if explanations is None else explanations[0]

    def close(self) -> None:
        """Abort what is unfinished."""
        self._generation.close()

    async def __aiter__(self) -> AsyncGenerator[ChatEvent, None]:
        async with aclosing(aiter(self._generation)) as deltas:
            async for delta in deltas:
                output = delta.output
                pieces: list[AnswerPiece] = [TextPiece(output.text)] if output.text else []
                yield ChatEvent(delta.choice, pieces, output, finish_reason(output), output.stop_reason)

    async def collect(self) -> list[ChatAnswer]:
        """All choices, complete."""
        return [
            ChatAnswer(
                choice, ParsedAnswer.of([TextPiece(output.text)]), output, finish_reason(output), output.stop_reason
            )
            for choice, output in enumerate(await self._generation.collect())
        ]
