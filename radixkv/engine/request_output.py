"""Requests converted to the outputs that users get."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from radixkv.engine.sampled_token import TokenDecoder
from radixkv.outputs import BeamSearchOutput, BeamSearchSequence, CompletionOutput, Logprob, RequestOutput
from radixkv.sampling.detokenizer import answer_text, decode_tokens
from radixkv.sampling_params import BeamSearchParams, SamplingParams
from radixkv.scheduling.request import Request, TokenSequence


def request_output(request: Request) -> RequestOutput:
    """All that was generated so far; for answers that were begun elsewhere, all that was generated here."""
    return _output(
        request,
        [_completion(s, _text(s), s.output_token_ids[s.num_resumed :], s.num_resumed) for s in request.sequences],
    )


def delta_output(request: Request) -> RequestOutput:
    """What is new in each sample since the last call, without samples whose end an earlier call returned."""
    completions = []
    for sequence in request.sequences:
        if sequence.end_streamed:
            continue
        start = sequence.num_streamed
        text = "" if sequence.detokenizer is None else sequence.detokenizer.delta()
        new = sequence.token_ids[request.num_prompt_tokens + start : sequence.num_known_tokens]
        completions.append(_completion(sequence, text, new, start))
        sequence.num_streamed += len(completions[-1].token_ids)
        sequence.end_streamed = sequence.finish_reason is not None
    return _output(request, completions)


def beam_output(request: Request, decode: TokenDecoder) -> BeamSearchOutput:
    """A finished search's beams, best first, without their texts, which `with_texts` adds."""
    assert request.beam_search is not None and isinstance(request.params, BeamSearchParams)
    prompt_ids = request.prompt_token_list
    sequences = []
    for beam in request.beam_search.results():
        logprobs = [
            {
                token_id: Logprob(logprob, rank, decode(token_id))
                for token_id, logprob, rank in [*step.top_logprobs, (step.token_id, step.logprob, step.rank)]
            }
            for step in beam.history
        ]
        sequences.append(
            BeamSearchSequence(
                tokens=prompt_ids + beam.token_ids,
                logprobs=logprobs,
                cum_logprob=beam.history[-1].score,
                text=None,
                finish_reason=beam.finish_reason,
                stop_reason=beam.stop_reason,
            )
        )
    return BeamSearchOutput(
        sequences=sequences,
        num_prompt_tokens=request.num_prompt_tokens,
        num_cached_tokens=request.num_cached_tokens or 0,
        metrics=request.metrics,
        aborted=any(sequence.finish_reason == "abort" for sequence in request.sequences),
    )


def with_texts(output: BeamSearchOutput, tokenizer: Any) -> BeamSearchOutput:
    """The beams with their texts; unchanged where there is no tokenizer. The prompt, which may be long, is decoded once."""
    if tokenizer is None or not output.sequences:
        return output
    num_prompt_tokens = output.num_prompt_tokens
    prompt_ids = output.sequences[0].tokens[:num_prompt_tokens]
    prompt = decode_tokens(tokenizer, prompt_ids)
    sequences = [
        replace(
            beam,
            text=prompt
            + answer_text(tokenizer, prompt_ids, beam.tokens[num_prompt_tokens:], skip_special_tokens=False),
        )
        for beam in output.sequences
    ]
    return replace(output, sequences=sequences)


def _text(sequence: TokenSequence) -> str:
    if sequence.detokenizer is None:
        return ""
    return sequence.detokenizer.text[sequence.num_resumed_characters :]


def _completion(sequence: TokenSequence, text: str, token_ids: list[int], first: int) -> CompletionOutput:
    params, first_logprob = sequence.request.params, first - sequence.num_resumed
    with_logprobs = isinstance(params, SamplingParams) and params.logprobs is not None
    return CompletionOutput(
        index=sequence.index,
        text=text,
        token_ids=token_ids,
        cumulative_logprob=sequence.cumulative_logprob if with_logprobs else None,
        logprobs=sequence.logprobs[first_logprob : first_logprob + len(token_ids)] if with_logprobs else None,
        finish_reason=sequence.finish_reason,
        stop_reason=sequence.stop_reason,
    )


def _output(request: Request, completions: list[CompletionOutput]) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        prompt=request.prompt,
        prompt_token_ids=request.prompt_token_list,
        prompt_logprobs=request.prompt_logprobs,
        outputs=completions,
        finished=request.finished,
        num_cached_tokens=request.num_cached_tokens or 0,
        metrics=request.metrics,
    )
