"""From a request that is understood to what is new of its choices, piece by piece."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Protocol, TypeVar

from fastapi import Request
from fastapi.responses import Response, StreamingResponse
from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from radixkv.engine.request_stream import OutputDelta, RequestStream
from radixkv.errors import DrainingError
from radixkv.model.loader import LoadedModel
from radixkv.outputs import BeamSearchSequence, CompletionOutput, PromptLogprobs, RequestOutput
from radixkv.prompts import Prompt
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.cache_insight import CacheExplanation, explanations
from radixkv.server.errors import ApiError, as_api_error
from radixkv.server.metrics import RequestTimer, ServerMetrics
from radixkv.server.protocol import GenerationRequest, PromptTokensDetails, Usage
from radixkv.server.service import Service

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class NewText:
    """What is new of one choice.

    Attributes:
        choice: its place in the response: ``n`` choices of the first prompt, then those of the second, and so on.
        prompt: which prompt it continues.
        output: its new text and tokens.
    """

    choice: int
    prompt: int
    output: CompletionOutput


class Generation:
    """The answers to the prompts of one HTTP request. Iterate it once, to the end; whoever cannot, calls `close`."""

    def __init__(
        self,
        loaded: LoadedModel,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        num_choices: int,
        streams: list[RequestStream],
        metrics: ServerMetrics,
    ) -> None:
        self._loaded = loaded
        self._prompts = prompts
        self._params = params
        self._num_choices = num_choices
        self._streams = streams
        self._timers = [RequestTimer(metrics) for _ in streams]
        self._cached = [0] * len(prompts)
        self._num_completion_tokens = 0
        # Of each prompt; known when its first piece has come.
        self.prompt_logprobs: list[PromptLogprobs | None] = [None] * len(prompts)
        # Of each prompt, where the request asked for them.
        self.explanations: list[CacheExplanation] | None = None

    @staticmethod
    async def start(
        service: Service,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        body: GenerationRequest,
        request_id: str,
    ) -> Generation:
        """Have all prompts taken in, or, raising what `AsyncLLM.submit` raises, none."""
        explained = await explanations(service, prompts) if body.explain_cache else None
        streams = await service.llm.submit(prompts, params, request_id, priority=body.priority or 0)
        generation = Generation(service.llm.loaded, prompts, params, body.num_choices, streams, service.metrics)
        generation.explanations = explained
        return generation

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self._prompts)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_completion_tokens,
            total_tokens=num_prompt + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=sum(self._cached)),
        )

    def close(self) -> None:
        """Abort what is unfinished."""
        for stream, timer in zip(self._streams, self._timers, strict=True):
            if not stream.closed:
                stream.close()
                timer.observe_abort()

    async def __aiter__(self) -> AsyncGenerator[NewText, None]:
        finished: set[int] = set()
        try:
            async with aclosing(_merged(self._streams)) as pieces:
                async for place, piece in pieces:
                    self._timers[place].observe(piece)
                    self._cached[place] = piece.num_cached_tokens
                    if isinstance(piece, RequestOutput):
                        self.prompt_logprobs[place] = piece.prompt_logprobs
                    for output in self._outputs(piece):
                        choice = place * self._num_choices + output.index
                        if output.finish_reason == "abort":
                            raise DrainingError("the server is shutting down; the answer is incomplete")
                        if choice in finished:
                            continue
                        if output.finish_reason is not None:
                            finished.add(choice)
                        self._num_completion_tokens += len(output.token_ids)
                        yield NewText(choice, place, output)
        finally:
            self.close()

    async def collect(self) -> list[CompletionOutput]:
        """All choices, complete."""
        choices: dict[int, CompletionOutput] = {}
        async with aclosing(aiter(self)) as news:
            async for new in news:
                whole = choices.setdefault(new.choice, new.output)
                if whole is not new.output:
                    whole.text += new.output.text
                    whole.token_ids += new.output.token_ids
                    whole.logprobs = None if whole.logprobs is None else whole.logprobs + (new.output.logprobs or [])
                    whole.finish_reason, whole.stop_reason = new.output.finish_reason, new.output.stop_reason
        return [choices[choice] for choice in sorted(choices)]

    def _outputs(self, piece: OutputDelta) -> list[CompletionOutput]:
        if isinstance(piece, RequestOutput):
            return piece.outputs
        best = piece.sequences[: self._num_choices]
        return [self._beam(index, beam, piece.num_prompt_tokens) for index, beam in enumerate(best)]

    def _beam(self, index: int, beam: BeamSearchSequence, num_prompt_tokens: int) -> CompletionOutput:
        prompt_token_ids, token_ids = beam.tokens[:num_prompt_tokens], beam.tokens[num_prompt_tokens:]
        text = IncrementalDetokenizer(
            self._loaded.require_tokenizer(), prompt_token_ids, stop=self._params.stop_strings
        )
        text.append(token_ids)
        text.finish()
        return CompletionOutput(
            index=index,
            text=text.text,
            token_ids=token_ids,
            cumulative_logprob=beam.cum_logprob,
            logprobs=None if self._params.logprobs is None else beam.logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )


class Writer(Protocol):
    """Writes an endpoint's responses: whole, or in chunks."""

    async def whole(self, generation: Generation) -> BaseModel: ...

    def chunks(self, generation: Generation) -> AsyncIterator[BaseModel]: ...


class JsonResponse(Response):
    """A model as JSON, written once. (What a route returns as a plain model would be validated and copied again.)"""

    media_type = "application/json"

    def __init__(self, content: BaseModel) -> None:
        super().__init__(content.model_dump_json())


class EventStream(StreamingResponse):
    """Server-sent events; when the client goes away, the iteration that makes them is closed."""

    media_type = "text/event-stream"

    def __init__(self, chunks: AsyncIterator[BaseModel], generation: Generation) -> None:
        self._events = _as_events(chunks)
        self._generation = generation
        super().__init__(self._events, headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            # An iteration that was closed before its first step has not closed anything itself.
            self._generation.close()


async def _as_events(chunks: AsyncIterator[BaseModel]) -> AsyncGenerator[str, None]:
    """Chunks as server-sent events in OpenAI's manner; a failure is the last of them, for the status is long sent."""
    try:
        async for chunk in chunks:
            yield f"data: {chunk.model_dump_json()}\n\n"
    except Exception as error:
        yield f"data: {as_api_error(error).body.model_dump_json()}\n\n"
    yield "data: [DONE]\n\n"


async def respond(request: Request, generation: Generation, writer: Writer, stream: bool) -> Response:
    """The response to a request whose prompts were taken in; however it ends, none of them stays in the engine.

    Raises:
        Exception: of a whole response, what ended the generation early.
    """
    if stream:
        return EventStream(writer.chunks(generation), generation)
    try:
        return JsonResponse(await _unless_disconnected(request, writer.whole(generation)))
    finally:
        generation.close()


async def _unless_disconnected(request: Request, work: Coroutine[Any, Any, _T]) -> _T:
    """The result of ``work``, which is cancelled when the client goes away before it is there.

    Raises:
        ApiError: the client is gone; nobody will read it.
    """
    task = asyncio.ensure_future(work)
    listener = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, listener}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ApiError(HTTPStatus.BAD_REQUEST, "the client disconnected")
        return task.result()
    finally:
        task.cancel()
        listener.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _merged(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The pieces of all streams as they come, each with the place of its stream."""
    if len(streams) == 1:
        async for piece in streams[0]:
            yield 0, piece
        return
    waiting = {asyncio.ensure_future(anext(stream)): place for place, stream in enumerate(streams)}
    try:
        while waiting:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                place = waiting.pop(task)
                yield place, task.result()
                if not streams[place].closed:
                    waiting[asyncio.ensure_future(anext(streams[place]))] = place
    finally:
        for task in waiting:
            task.cancel()
