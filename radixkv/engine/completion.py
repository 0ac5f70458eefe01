"""What becomes of a chosen token: text, log-probabilities, and perhaps the answer's end."""

from __future__ import annotations

from typing import Any

from radixkv.outputs import Logprob
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.sampler import SampledToken, SamplingRow
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import Sequence


def equip_for_sampling(sequence: Sequence, tokenizer: Any) -> None:
    """Give a new sequence what it needs to have tokens chosen and, with a tokenizer, to become text."""
    request, params = sequence.request, sequence.request.params
    assert isinstance(params, SamplingParams)
    sequence.row = SamplingRow(
        params=params,
        seed=request.seed,
        sample_index=sequence.index,
        prompt_token_ids=request.prompt_token_ids,
        grammar=None if request.grammar is None else request.grammar.fork(),
        forbidden_token_ids=request.end_token_ids | params.end_token_ids if params.min_tokens else frozenset(),
    )
    if tokenizer is not None:
        sequence.detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )


def append_token(sequence: Sequence, token: SampledToken, tokenizer: Any) -> None:
    """Add a chosen token to its sequence, or put it where it was expected; note whether that ends the answer, and why."""
    request, params = sequence.request, sequence.request.params
    assert isinstance(params, SamplingParams)
    assert sequence.row is not None
    if sequence.num_unknown:
        sequence.learn_token(token.token_id)
    else:
        sequence.token_ids.append(token.token_id)
    sequence.row.output_token_ids.append(token.token_id)
    if token.logprob is not None:
        sequence.cumulative_logprob += token.logprob
        sequence.logprobs.append(named_logprobs(token, tokenizer))
    num_new = len(sequence.row.output_token_ids)
    may_stop = num_new >= params.min_tokens
    if may_stop and token.token_id in request.end_token_ids:
        sequence.finish_reason = "stop"
    elif may_stop and token.token_id in params.end_token_ids:
        sequence.finish_reason, sequence.stop_reason = "stop", token.token_id
    # A token that ends the answer is one of its tokens, and no part of its text unless that is asked for (as in vLLM).
    if sequence.detokenizer is not None and (params.include_stop_str_in_output or sequence.finish_reason is None):
        stop = sequence.detokenizer.append([token.token_id], may_stop)
        if stop is not None and sequence.finish_reason is None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
    grammar = sequence.row.grammar
    if grammar is not None:
        grammar.advance(token.token_id)
        if sequence.finish_reason is None and grammar.complete:
            sequence.finish_reason = "stop"
    if sequence.finish_reason is None and num_new >= request.max_new_tokens:
        sequence.finish_reason = "length"
    if sequence.finish_reason is not None and sequence.detokenizer is not None:
        sequence.detokenizer.finish()


def named_logprobs(token: SampledToken, tokenizer: Any) -> dict[int, Logprob]:
    """A token's log-probabilities with the tokens' texts."""
    return {
        token_id: Logprob(logprob, rank, None if tokenizer is None else tokenizer.decode([token_id]))
        for token_id, logprob, rank in token.top_logprobs
    }
