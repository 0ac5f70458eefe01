"""What follows from a sampled token: text, log-probabilities, and whether the sequence ends.

It is not in `radixkv.sampling`, because it needs sequences, which belong to scheduling, and sampling imports no scheduling.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from radixkv.outputs import Logprob
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.logprobs import SampledToken
from radixkv.sampling.sampler import SamplingState
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import TokenSequence

# Text of a single token, see `radixkv.sampling.detokenizer.token_decoder`.
TokenDecoder = Callable[[int], str | None]


def prepare_sampling(sequence: TokenSequence, tokenizer: Any) -> None:
    """Give a new sequence its sampling state and, if text is wanted and there is a tokenizer, its detokenizer."""
    request, params = sequence.request, sequence.request.params
    assert isinstance(params, SamplingParams)
    sequence.sampling = SamplingState(
        params=params,
        seed=request.seed or 0,  # only a greedy request that is resumed has none yet, and needs none
        sample_index=sequence.index,
        prompt_token_ids=request.prompt_token_ids,
        changes=request.logit_changes,
        grammar=None if request.grammar is None else request.grammar.fork(),
    )
    if tokenizer is not None and params.detokenize:
        sequence.detokenizer = IncrementalDetokenizer(
            tokenizer,
            request.prompt_token_ids,
            skip_special_tokens=params.skip_special_tokens,
            shown_special_tokens=params.shown_special_tokens,
            stop=params.stop_strings,
            include_stop_str_in_output=params.include_stop_str_in_output,
        )


def append_token(sequence: TokenSequence, token_id: int) -> None:
    """Append a sampled token to its sequence, or fill its placeholder; note whether that ends the sequence, and why."""
    request, state = sequence.request, sequence.sampling
    assert state is not None
    params = state.params
    if sequence.num_placeholders:
        sequence.fill_placeholder(token_id)
    else:
        sequence.token_ids.append(token_id)
    state.output_token_ids.append(token_id)
    num_new = len(state.output_token_ids)
    may_stop = num_new >= params.min_tokens
    if may_stop and token_id in request.end_token_ids:
        sequence.finish_reason = "stop"
    elif may_stop and token_id in params.end_token_ids:
        sequence.finish_reason, sequence.stop_reason = "stop", token_id
    # A token that ends the sequence is one of its tokens, and not part of its text unless that is requested (as in vLLM).
    if sequence.detokenizer is not None and (params.include_stop_str_in_output or sequence.finish_reason is None):
        stop = sequence.detokenizer.append([token_id], may_stop and sequence.finish_reason is None)
        if stop is not None:
            sequence.finish_reason, sequence.stop_reason = "stop", stop
    grammar = state.grammar
    if grammar is not None:
        grammar.advance(token_id)
        if grammar.complete:
            sequence.finish_reason = "stop"
    if sequence.finish_reason is None and num_new >= request.max_new_tokens:
        sequence.finish_reason = "length"
    if sequence.finish_reason is not None and sequence.detokenizer is not None:
        sequence.detokenizer.finish()


def logprobs_with_text(token: SampledToken, decode: TokenDecoder) -> dict[int, Logprob]:
    """A token's log-probabilities with the tokens' texts: its own first, then the likeliest (vLLM's order)."""
    entries = sorted(token.top_logprobs, key=lambda entry: entry[0] != token.token_id)
    return {token_id: Logprob(logprob, rank, decode(token_id)) for token_id, logprob, rank in entries}
