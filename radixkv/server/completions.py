"""`POST /v1/completions`."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, Field

from radixkv.model.loader import LoadedModel
from radixkv.outputs import Logprob
from radixkv.prompts import Prompt, as_prompts
from radixkv.server.cache_insight import CacheExplanation
from radixkv.server.errors import client_errors
from radixkv.server.generation import Generation, NewText, respond
from radixkv.server.not_supported import NotSupportedInCompletions
from radixkv.server.protocol import MAX_LOGPROBS, FinishReason, GenerationRequest, ResponseHead, Usage, finish_reason
from radixkv.server.service import Service, new_id
from radixkv.server.tenants import Credentials
from radixkv.server.token_text import TokenTexts

# OpenAI's.
_DEFAULT_MAX_TOKENS = 16


class CompletionRequest(GenerationRequest, NotSupportedInCompletions):
    """One prompt or several, as texts or token ids."""

    prompt: str | list[int] | list[str] | list[list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    best_of: int | None = None

    @property
    def sent_names(self) -> dict[str, str]:
        return super().sent_names | {"prompts": "prompt", "prompt_token_ids": "prompt"}


class CompletionLogprobs(BaseModel):
    """Log-probabilities, a token each; None for a prompt's first token, which nothing precedes."""

    text_offset: list[int]
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]


class CompletionChoice(BaseModel):
    """One answer, or what is new of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None


class Completion(BaseModel):
    """The response, and each chunk of a streamed one."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    cache_explanations: list[CacheExplanation] | None = None  # one a prompt


def completion_routes(service: Service) -> APIRouter:
    """The endpoint."""
    router = APIRouter()

    @router.post("/v1/completions", tags=["generation"], response_model=Completion)
    async def complete(body: CompletionRequest, request: Request, credentials: Credentials) -> Response:
        """Complete prompts."""
        tenant = service.tenants.authenticate(credentials)
        service.check_model(body.model)
        with client_errors(body.sent_names):
            if body.best_of not in (None, body.num_choices):
                raise ValueError(f"best_of: expected n={body.num_choices}, got {body.best_of}: more are not supported")
            for prompt in [body.prompt] if isinstance(body.prompt, str) else body.prompt:
                if isinstance(prompt, str):
                    service.check_length("prompt", prompt)
            prompts = await service.llm.run_tokenizer(lambda loaded: _prompts(body, loaded))
            prompts = [service.with_cache_options(prompt, body, tenant) for prompt in prompts]
            max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
            # A prompt is scored without going on by asking for no tokens; one is generated all the same, and not shown.
            scores_only = bool(body.echo) and max_tokens == 0
            params = body.params(
                1 if scores_only else max_tokens,
                body.logprobs,
                body.logprobs if body.echo else None,
                service.room_after(prompts),
            )
            name = new_id("cmpl")
            writer = _Writer(body, name, service, prompts, scores_only)
            generation = await Generation.start(service, prompts, params, body, name)
        return await respond(request, generation, writer, bool(body.stream))

    return router


class _Writer:
    """Writes one request's response."""

    def __init__(
        self, body: CompletionRequest, name: str, service: Service, prompts: list[Prompt], scores_only: bool
    ) -> None:
        self._body = body
        self._scores_only = scores_only
        self._prompts = prompts
        self._texts = service.token_texts
        self._head = ResponseHead(id=name, created=int(time.time()), model=service.model_name)
        self._tokenizer = service.llm.loaded.tokenizer
        # By choice: the length of the text so far, as far as it is made of tokens with log-probabilities.
        self._offsets: dict[int, int] = {}

    async def whole(self, generation: Generation) -> Completion:
        outputs = await generation.collect()
        choices = [
            self._choice(NewText(place, place // self._body.num_choices, output), generation)
            for place, output in enumerate(outputs)
        ]
        explained = generation.explanations
        return Completion(**self._head, choices=choices, usage=self._usage(generation), cache_explanations=explained)

    async def chunks(self, generation: Generation) -> AsyncGenerator[Completion, None]:
        async with aclosing(aiter(generation)) as news:
            async for new in news:
                choice = self._choice(new, generation)
                if choice.text or choice.logprobs is not None or choice.finish_reason is not None:
                    yield Completion(**self._head, choices=[choice])
        if self._body.includes_usage:
            yield Completion(**self._head, choices=[], usage=self._usage(generation))

    def _choice(self, new: NewText, generation: Generation) -> CompletionChoice:
        output, echo = new.output, bool(self._body.echo) and new.choice not in self._offsets
        text = "" if self._scores_only else output.text
        entries: list[tuple[int, dict[int, Logprob] | None]] = []
        prompt = self._prompts[new.prompt]
        if echo:
            text = self._prompt_text(prompt) + text
            entries += zip(prompt.token_ids, generation.prompt_logprobs[new.prompt] or [], strict=False)
        if not self._scores_only:
            entries += zip(output.token_ids, output.logprobs or [], strict=False)
        offset = self._offsets.setdefault(new.choice, 0)
        logprobs = None
        if self._body.logprobs is not None:
            logprobs, self._offsets[new.choice] = _logprobs(entries, self._texts, self._body.logprobs, offset)
        return CompletionChoice(
            index=new.choice,
            text=text,
            logprobs=logprobs,
            finish_reason=finish_reason(output),
            stop_reason=output.stop_reason,
        )

    def _usage(self, generation: Generation) -> Usage:
        usage = generation.usage
        if self._scores_only:
            usage.completion_tokens, usage.total_tokens = 0, usage.prompt_tokens
        return usage

    def _prompt_text(self, prompt: Prompt) -> str:
        if prompt.text is not None:
            return prompt.text
        text: str = self._tokenizer.decode(list(prompt.token_ids), skip_special_tokens=False)
        return text


def _prompts(body: CompletionRequest, loaded: LoadedModel) -> list[Prompt]:
    given = body.prompt
    if isinstance(given, str):
        return as_prompts(given, loaded)
    if not given:
        raise ValueError("prompt: expected at least one, got an empty list")
    if isinstance(given[0], int):
        return as_prompts({"prompt_token_ids": given}, loaded)
    return as_prompts([p if isinstance(p, str) else {"prompt_token_ids": p} for p in given], loaded)


def _logprobs(
    entries: list[tuple[int, dict[int, Logprob] | None]], texts: TokenTexts, num_top: int, offset: int
) -> tuple[CompletionLogprobs, int]:
    """Log-probabilities of tokens whose text begins at ``offset``, and where it ends."""
    result = CompletionLogprobs(text_offset=[], tokens=[], token_logprobs=[], top_logprobs=[])
    for token_id, logprobs in entries:
        text = texts.text(token_id)
        result.text_offset.append(offset)
        result.tokens.append(text)
        result.token_logprobs.append(None if logprobs is None else logprobs[token_id].logprob)
        likeliest = [] if logprobs is None else sorted(logprobs.items(), key=lambda item: item[1].rank)
        result.top_logprobs.append(
            None if logprobs is None else {texts.text(top_id): top.logprob for top_id, top in likeliest[:num_top]}
        )
        offset += len(text)
    return result, offset
