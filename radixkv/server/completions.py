"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from functools import partial
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field, SerializeAsAny

from radixkv.model.text_interface import TextInterface
from radixkv.outputs import Logprob
from radixkv.prompts import Prompt, PromptInput, as_prompts
from radixkv.sampling.detokenizer import decode_tokens
from radixkv.server.access.authentication import CurrentTenant
from radixkv.server.access.rate_limits import default_max_tokens
from radixkv.server.access.tenants import Tenant
from radixkv.server.errors import client_errors
from radixkv.server.generation import ChoiceDelta, Generation
from radixkv.server.not_supported import NotSupportedInCompletions
from radixkv.server.operation.explanations import CacheExplanation
from radixkv.server.output.logprobs import (
    CompletionLogprobs,
    EncodedPromptLogprobs,
    TextLength,
    encode_completion_logprobs,
    encode_prompt_logprobs,
)
from radixkv.server.output.respond import cancel_on_disconnect, respond
from radixkv.server.output.response_size import check_response_size
from radixkv.server.protocol import (
    MAX_LOGPROBS,
    GenerationRequest,
    ResponseHead,
    TextFinishReason,
    Usage,
    finish_reason,
)
from radixkv.server.service import Service, new_id, response_id

# OpenAI's default.
_DEFAULT_MAX_TOKENS = 16
# So that refusing a request takes little time; what fits into the queue and the model is checked afterwards.
_MAX_PROMPTS = 4096
_MAX_PROMPT_TOKENS = 1 << 20
# Characters, or token ids. A dozen texts of 600,000 kept the tokenizer's thread for 12 s of processor time.
_TURN_LENGTH = 1 << 16

PromptIds = Annotated[list[int], Field(max_length=_MAX_PROMPT_TOKENS)]


class CompletionRequest(GenerationRequest, NotSupportedInCompletions):
    """One prompt or several, as texts or token ids."""

    prompt: (
        str
        | PromptIds
        | Annotated[list[str], Field(max_length=_MAX_PROMPTS)]
        | Annotated[list[PromptIds], Field(max_length=_MAX_PROMPTS)]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @property
    def request_field_names(self) -> dict[str, str]:
        return super().request_field_names | {"prompts": "prompt", "prompt_token_ids": "prompt"}


class CompletionChoice(BaseModel):
    """One answer, or the new part of it."""

    index: int
    text: str
    logprobs: SerializeAsAny[CompletionLogprobs] | None = None
    finish_reason: TextFinishReason | None = None
    stop_reason: int | str | None = None
    # Only where they were asked for; the prompt's in the first chunk of a choice.
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_logprobs: EncodedPromptLogprobs | None = None


class Completion(BaseModel):
    """The response, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    cache_explanations: list[CacheExplanation] | None = None  # one per prompt


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", tags=["generation"], response_model=Completion)
    async def complete(body: CompletionRequest, request: Request, tenant: CurrentTenant) -> Response:
        """Complete prompts."""
        service.check_model(body.model)
        request_id = new_id("cmpl")
        generation = await cancel_on_disconnect(request, _start(service, body, tenant, request_id))
        writer = _CompletionResponseWriter(body, request_id, service, tenant)
        return await respond(request, generation, writer, bool(body.stream))

    return router


async def _start(service: Service, body: CompletionRequest, tenant: Tenant, request_id: str) -> Generation:
    """Check a request, tokenize its prompts and submit them; see `radixkv.server.chat.events.start_chat`."""
    deadlines = service.deadlines(body)
    with client_errors(body.request_field_names):
        if body.best_of not in (None, body.num_choices):
            raise ValueError(
                f"best_of: expected n={body.num_choices}, got {body.best_of}: all that is generated is returned"
            )
        sent = _sent_prompts(body)
        for prompt in sent:
            if isinstance(prompt, str):
                service.check_length("prompt", prompt)
            elif body.truncate_prompt_tokens is None:
                service.check_num_tokens("prompt", len(prompt))
        add_special_tokens = body.add_special_tokens is not False
        prompts: list[Prompt] = []
        async with deadlines.before_admission(len(sent)) as timers:
            for some in _turns(sent):
                tokenize = partial(as_prompts, some, add_special_tokens=add_special_tokens)
                # Each turn holds queue slots for all prompts, and no other request takes them between two turns.
                prompts += await service.llm.run_tokenizer(tokenize, tenant=tenant.name, num_slots=len(sent))
            prompts = [service.with_cache_options(prompt, body, tenant) for prompt in prompts]
            defaults, max_model_len = service.llm.loaded.sampling_defaults, service.llm.loaded.max_model_len
            max_tokens = body.max_tokens
            if max_tokens is None:
                max_tokens = default_max_tokens(_DEFAULT_MAX_TOKENS, body.min_tokens or 0, tenant)
            prompts = [body.truncated(prompt, max_tokens, max_model_len) for prompt in prompts]
            # max_tokens=0 with echo scores the prompt.
            prompt_only = bool(body.echo) and max_tokens == 0
            if prompt_only and body.min_tokens:
                raise ValueError(f"min_tokens: expected none with max_tokens=0, got {body.min_tokens}")
            max_tokens = 1 if prompt_only else max_tokens
            params = body.params(max_tokens, body.logprobs, _num_prompt_logprobs(body), defaults)
            repeating = "echo" if body.echo else "return_token_ids" if body.return_token_ids else None
            check_response_size(body, prompts, params, max_model_len, num_copies=body.num_choices, repeating=repeating)
            return await Generation.start(
                service, tenant, prompts, params, body, request_id, timers, deadlines, prompt_only=prompt_only
            )


class _CompletionResponseWriter:
    """Writes one request's response."""

    def __init__(self, body: CompletionRequest, request_id: str, service: Service, tenant: Tenant) -> None:
        self._body = body
        self._texts = service.token_texts
        self._encoder = service.encoder
        self._head = ResponseHead(id=response_id(request_id, body), created=int(time.time()), model=service.model_name)
        self._llm = service.llm
        self._tenant = tenant.name
        self._prompt_texts: dict[int, str] = {}
        # By choice: how long the text is whose log-probabilities were returned, which is the next `text_offset`.
        self._lengths: dict[int, TextLength] = {}

    async def full_response(self, generation: Generation) -> Completion:
        outputs = await generation.collect()
        choices = [
            await self._choice(ChoiceDelta(index, index // self._body.num_choices, output), generation)
            for index, output in outputs.items()
        ]
        explanations = generation.explanations
        return Completion(**self._head, choices=choices, usage=generation.usage, cache_explanations=explanations)

    async def chunks(self, generation: Generation) -> AsyncGenerator[Completion, None]:
        async with aclosing(aiter(generation)) as deltas:
            async for delta in deltas:
                choice = await self._choice(delta, generation)
                if choice.text or choice.logprobs is not None or choice.finish_reason is not None or choice.token_ids:
                    usage = generation.usage if self._body.includes_usage_in_every_chunk else None
                    yield Completion(**self._head, choices=[choice], usage=usage)
        if self._body.includes_usage:
            yield Completion(**self._head, choices=[], usage=generation.usage)

    async def _choice(self, delta: ChoiceDelta, generation: Generation) -> CompletionChoice:
        is_first = delta.choice not in self._lengths
        output, text = delta.output, delta.output.text
        entries: list[tuple[int, dict[int, Logprob] | None]] = []
        prompt, prompt_logprobs = generation.prompts[delta.prompt], generation.prompt_logprobs(delta.prompt)
        echoed = await self._prompt_text(delta.prompt, prompt) if self._body.echo and is_first else None
        if echoed is not None:
            text = echoed + text
            entries += zip(prompt.token_ids, prompt_logprobs or [], strict=False)
        entries += zip(output.token_ids, output.logprobs or [], strict=False)
        if is_first:
            self._lengths[delta.choice] = TextLength(
                self._texts,
                prompt.token_ids,
                echoed=echoed,
                skip_special_tokens=self._body.skip_special_tokens is not False,
            )
        length = self._lengths[delta.choice]
        logprobs = None
        if self._body.logprobs is not None:
            write = partial(encode_completion_logprobs, entries, self._body.logprobs, length, self._texts)
            num_entries = len(entries) * (1 + self._body.logprobs)
            logprobs = await self._encoder.run(num_entries, write)
        return CompletionChoice(
            index=delta.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
            token_ids=output.token_ids if self._body.return_token_ids else None,
            prompt_token_ids=list(prompt.token_ids) if self._body.return_token_ids and is_first else None,
            prompt_logprobs=await encode_prompt_logprobs(self._encoder, prompt_logprobs, self._body.prompt_logprobs),
        )

    async def _prompt_text(self, index: int, prompt: Prompt) -> str:
        """A prompt's text; one that was sent as ids is decoded once, off the event loop."""
        if prompt.text is not None:
            return prompt.text
        if index not in self._prompt_texts:

            def decode(loaded: TextInterface) -> str:
                return decode_tokens(loaded.require_tokenizer(), list(prompt.token_ids), skip_special_tokens=False)

            self._prompt_texts[index] = await self._llm.run_tokenizer(decode, tenant=self._tenant, num_slots=0)
        return self._prompt_texts[index]


def _sent_prompts(body: CompletionRequest) -> list[str] | list[list[int]]:
    """The request's prompts, one or several."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise ValueError("prompt: expected at least one, got an empty list")
    return [prompt] if isinstance(prompt[0], int) else prompt


def _turns(sent: list[str] | list[list[int]]) -> Iterator[list[PromptInput]]:
    """Splits prompts into those tokenized in one turn; after each turn, the texts of other tenants have theirs."""
    turn: list[PromptInput] = []
    length = 0
    for prompt in sent:
        turn.append(prompt)
        length += len(prompt)
        if length >= _TURN_LENGTH:
            yield turn
            turn, length = [], 0
    if turn:
        yield turn


def _num_prompt_logprobs(body: CompletionRequest) -> int | None:
    """How many of the likeliest tokens to report for the prompt: both its own log-probabilities and echoed ones need them."""
    if not body.echo or body.logprobs is None:
        return body.prompt_logprobs
    return max(body.logprobs, body.prompt_logprobs or 0)
