"""Runs the prompts of one HTTP request in the engine and yields the new text and tokens of each choice."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from radixkv.errors import DrainingError, StructuredOutputError
from radixkv.model.text_interface import TextInterface
from radixkv.outputs import (
    BeamSearchOutput,
    BeamSearchSequence,
    CompletionOutput,
    FinishReason,
    PromptLogprobs,
    RequestMetrics,
    RequestOutput,
)
from radixkv.prompts import Prompt
from radixkv.sampling.detokenizer import answer_text
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.server.access.rate_limits import Reservation
from radixkv.server.access.tenants import Tenant
from radixkv.server.errors import client_error
from radixkv.server.operation.explanations import CacheExplanation, explain_prompts
from radixkv.server.operation.metrics import RequestTimer
from radixkv.server.protocol import CompletionTokensDetails, GenerationRequest, PromptTokensDetails, Usage
from radixkv.server.service import Service
from radixkv.server.time_limits import Deadlines
from radixkv.serving.request_stream import OutputDelta, RequestStream

_CUT_SHORT = "the server is shutting down; the answer is incomplete"


@dataclass(frozen=True, slots=True)
class ChoiceDelta:
    """New output of one choice.

    Attributes:
        choice: its index in the response: ``n`` choices of the first prompt, then those of the second, and so on.
        prompt: index of the prompt that it continues.
        output: its new text and tokens.
    """

    choice: int
    prompt: int
    output: CompletionOutput


@dataclass(eq=False)
class Generation:
    """The answers to the prompts of one HTTP request. Iterate it once, to the end, or call `close`.

    Attributes:
        loaded: the text interface of the model.
        prompts: tokenized; ``streams`` and ``timers`` have one entry for each.
        params: for all prompts.
        body: the request.
        streams: the outputs of the prompts, closed by `close`.
        timers: measure the choices of each prompt.
        deadlines: end the prompts when the request takes too long.
        reservation: what the tenant's rate limits were charged in advance; settled by `close`.
        request_id: as in the response.
        explanations: by prompt; None unless the request asked for them.
        prompt_only: see `start`.
        times: of the prompt that had a token first; None before.
    """

    loaded: TextInterface
    prompts: Sequence[Prompt]
    params: SamplingParams | BeamSearchParams
    body: GenerationRequest
    streams: list[RequestStream]
    timers: list[RequestTimer]
    deadlines: Deadlines
    reservation: Reservation
    request_id: str
    explanations: list[CacheExplanation] | None
    prompt_only: bool
    times: RequestMetrics | None = None

    def __post_init__(self) -> None:
        # By prompt; None before its first.
        self._latest: list[OutputDelta | None] = [None] * len(self.prompts)
        self._num_choices = self.body.num_choices
        self._num_expected = [self._num_choices] * len(self.prompts)
        self._num_finished = 0  # choices
        self._num_completion_tokens = 0
        self._num_tokens_left_out = 0  # of beams that were found and are not answers

    @staticmethod
    async def start(
        service: Service,
        tenant: Tenant,
        prompts: Sequence[Prompt],
        params: SamplingParams | BeamSearchParams,
        body: GenerationRequest,
        request_id: str,
        timers: list[RequestTimer],
        deadlines: Deadlines,
        *,
        prompt_only: bool,
    ) -> Generation:
        """Submit all prompts, or none, on behalf of the tenant.

        Args:
            timers: of each prompt, see `Deadlines.before_admission`.
            prompt_only: leave the tokens out of the answers: the request asks for none, but the engine always generates one.

        Raises:
            ValueError, ApiError: the tenant's limits do not allow it, see `RateLimits`.
            Exception: what `AsyncLLM.submit` raises.
        """
        lengths = [len(prompt.token_ids) for prompt in prompts]
        reservation = service.rate_limits.admit(tenant, params, lengths, service.llm.loaded.max_model_len)
        times = [RequestMetrics(deadlines.arrival) for _ in prompts]
        try:
            cache_explanations = (
                await explain_prompts(service, prompts, params, tenant.name) if body.explain_cache else None
            )
            streams = await service.llm.submit(
                prompts,
                params,
                request_id,
                priority=body.priority or 0,
                tenant=tenant.name,
                times=times,
            )
        except asyncio.CancelledError:  # the client has left, or the time is over
            begun = [length for length, each in zip(lengths, times, strict=True) if each.scheduled_time is not None]
            if not begun:
                reservation.cancel()
            elif isinstance(params, SamplingParams):
                reservation.settle(sum(begun))  # of a beam search all stays taken, as in `close`
            raise
        except Exception:
            reservation.cancel()
            raise
        for timer in timers:
            timer.expect(body.num_choices)
        deadlines.watch(streams)
        return Generation(
            loaded=service.llm.loaded,
            prompts=prompts,
            params=params,
            body=body,
            streams=streams,
            timers=timers,
            deadlines=deadlines,
            reservation=reservation,
            request_id=request_id,
            explanations=cache_explanations,
            prompt_only=prompt_only,
        )

    @property
    def complete(self) -> bool:
        """Whether every choice came to its own end."""
        return self._num_finished == sum(self._num_expected)

    @property
    def usage(self) -> Usage:
        """Tokens so far."""
        num_prompt = sum(len(prompt.token_ids) for prompt in self.prompts)
        known = [delta for delta in self._latest if delta is not None]
        drafts = [count for delta in known for count in list(delta.metrics.drafts.values())]
        num_accepted = sum(count.accepted for count in drafts)
        loaded: Counter[str] = Counter()
        for delta in known:
            loaded.update(delta.metrics.loaded_tokens)
        return Usage(
            prompt_tokens=num_prompt,
            completion_tokens=self._num_completion_tokens,
            total_tokens=num_prompt + self._num_completion_tokens,
            prompt_tokens_details=PromptTokensDetails(
                cached_tokens=sum(delta.num_cached_tokens for delta in known), loaded_tokens=dict(loaded) or None
            ),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=num_accepted,
                rejected_prediction_tokens=sum(count.drafted for count in drafts) - num_accepted,
            ),
        )

    def prompt_logprobs(self, prompt: int) -> PromptLogprobs | None:
        """Those of a prompt's tokens; None before its first delta, or where the request asked for none."""
        delta = self._latest[prompt]
        return delta.prompt_logprobs if isinstance(delta, RequestOutput) else None

    def close(self) -> None:
        """Abort the prompts that are unfinished."""
        self.deadlines.close()
        # What has waited in the queue all the time has cost nothing.
        lengths = [len(p.token_ids) for p, s in zip(self.prompts, self.streams, strict=True) if s.admitted]
        if self.complete or not lengths or isinstance(self.params, SamplingParams):
            self.reservation.settle(sum(lengths) + self._num_completion_tokens + self._num_tokens_left_out)
        # Otherwise all that was taken stays taken: a beam search has no tokens before its end, however long it ran.
        for stream, timer in zip(self.streams, self.timers, strict=True):
            stream.close()
            timer.end()

    async def __aiter__(self) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            async with aclosing(_merge_streams(self.streams)) as deltas:
                async for prompt, delta in deltas:
                    if isinstance(delta, BeamSearchOutput) and delta.sequences and not delta.aborted:
                        # It may have found fewer than were asked for.
                        self._num_expected[prompt] = min(len(delta.sequences), self._num_choices)
                        self.timers[prompt].expect(self._num_expected[prompt])
                    self.timers[prompt].observe(delta)
                    self._latest[prompt] = delta
                    self.times = self.times or delta.metrics
                    if isinstance(delta, BeamSearchOutput):
                        if delta.aborted:
                            raise DrainingError(_CUT_SHORT)
                        self._num_tokens_left_out += sum(delta.num_generated_tokens[self._num_choices :])
                    for output in self._outputs(delta):
                        choice = prompt * self._num_choices + output.index
                        if output.finish_reason == "abort":
                            raise DrainingError(_CUT_SHORT)
                        self._num_finished += output.finished()
                        answer = _without_tokens(output) if self.prompt_only else output
                        self._num_completion_tokens += len(answer.token_ids)
                        yield ChoiceDelta(choice, prompt, answer)
        except StructuredOutputError as error:
            raise client_error(error, self.body.request_field_names) from error
        finally:
            self.close()

    async def collect(self) -> dict[int, CompletionOutput]:
        """All choices, complete, by their index, which is that of `ChoiceDelta`."""
        choices: dict[int, CompletionOutput] = {}
        async with aclosing(aiter(self)) as deltas:
            async for delta in deltas:
                extend_choice(choices, delta.choice, delta.output)
        return dict(sorted(choices.items()))

    def _outputs(self, delta: OutputDelta) -> list[CompletionOutput]:
        if isinstance(delta, RequestOutput):
            return delta.outputs
        best = delta.sequences[: self._num_choices]
        return [self._beam_output(index, beam, delta.num_prompt_tokens) for index, beam in enumerate(best)]

    def _beam_output(self, index: int, beam: BeamSearchSequence, num_prompt_tokens: int) -> CompletionOutput:
        prompt_token_ids, token_ids = beam.tokens[:num_prompt_tokens], beam.tokens[num_prompt_tokens:]
        stopped = beam.finish_reason == "stop" and beam.stop_reason is None
        # A token that ends an answer is one of its tokens, and not part of its text.
        num_read = len(token_ids) - (stopped and token_ids[-1] in self.loaded.eos_token_ids)
        text = answer_text(self.loaded.require_tokenizer(), prompt_token_ids, token_ids[:num_read])
        if isinstance(beam.stop_reason, str):
            text = text.partition(beam.stop_reason)[0]
        return CompletionOutput(
            index=index,
            text=text,
            token_ids=token_ids,
            cumulative_logprob=beam.cum_logprob,
            logprobs=None if self.params.logprobs is None else beam.logprobs,
            finish_reason=beam.finish_reason,
            stop_reason=beam.stop_reason,
        )


def extend_choice(choices: dict[int, CompletionOutput], choice: int, new: CompletionOutput) -> None:
    """Add what is new in a choice to what there is of it; the first part is kept as it is, not copied."""
    whole = choices.setdefault(choice, new)
    if whole is not new:
        whole.extend(new)


def _without_tokens(output: CompletionOutput) -> CompletionOutput:
    """An answer without the token that was not asked for: it ended because it may have no more tokens."""
    reason: FinishReason | None = None if output.finish_reason is None else "length"
    return replace(output, text="", token_ids=[], logprobs=None, finish_reason=reason, stop_reason=None)


async def _merge_streams(streams: Sequence[RequestStream]) -> AsyncGenerator[tuple[int, OutputDelta], None]:
    """The deltas of all streams in order of arrival, each with the index of its stream."""
    if len(streams) == 1:
        async for delta in streams[0]:
            yield 0, delta
        return
    pending = {asyncio.ensure_future(anext(stream)): index for index, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                index = pending.pop(task)
                yield index, task.result()
                if not streams[index].closed:
                    pending[asyncio.ensure_future(anext(streams[index]))] = index
    finally:
        for task in pending:
            task.cancel()
