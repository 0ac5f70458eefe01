"""Resumes answers that were begun elsewhere, at the token where they stopped.

A token depends on the tokens before it, the request's seed, the sample and the position, and on nothing that an engine keeps
(`radixkv.sampling.sampler`). So the tokens are enough: replayed in order, they bring the grammar, the penalties, the
stop strings and the text to the state in which the next token is sampled. Their keys and values are prefilled, or found in
the cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radixkv.cache.arguments import is_number, is_whole
from radixkv.engine.resume_checks import check_resumable
from radixkv.engine.sampled_token import append_token, prepare_sampling
from radixkv.outputs import FINISH_REASONS, CompletionOutput
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.request import Request, TokenSequence


def resume_sequences(request: Request, outputs: Sequence[CompletionOutput], tokenizer: Any, vocab_size: int) -> None:
    """Give a request that is not added yet the sequences that ``outputs`` describe; none if nothing was generated.

    Args:
        outputs: one for each sample, in any order, with the tokens received so far, the cumulative log-probability if
            log-probabilities are wanted, and the finish reason if it has ended. The text follows from the tokens.

    Raises:
        TypeError, ValueError: the request cannot be resumed, or the outputs do not match its samples.
    """
    params = request.params
    if not isinstance(params, SamplingParams):
        raise ValueError("resume: a beam search cannot be resumed; start it anew")
    check_resumable(params, outputs)
    by_index = {output.index: output for output in outputs}
    for output in outputs:
        _validate(output, request, params, vocab_size)
    # Aborted before its first token, it has not begun: its prompt's log-probabilities are due, and samples fork from one.
    if not any(output.token_ids or output.finish_reason not in (None, "abort") for output in outputs):
        return
    for index in range(params.n):
        request.sequences.append(_resume(request, by_index[index], tokenizer))
    request.resumed = True


def _validate(output: CompletionOutput, request: Request, params: SamplingParams, vocab_size: int) -> None:
    name = f"resume: sample {output.index}"
    for token_id in output.token_ids:
        if not is_whole(token_id) or not 0 <= token_id < vocab_size:
            raise ValueError(
                f"{name}: expected token ids of the vocabulary of {vocab_size} tokens, got {token_id!r:.80}"
            )
    if len(output.token_ids) > request.max_new_tokens:
        raise ValueError(f"{name}: expected at most {request.max_new_tokens} tokens, got {len(output.token_ids)}")
    total = output.cumulative_logprob
    if params.logprobs is not None and output.token_ids and total is None:
        raise ValueError(f"{name}: expected its cumulative_logprob, since logprobs are asked for")
    if total is not None and not is_number(total):
        raise ValueError(f"{name}: expected a number as cumulative_logprob, got {total!r:.80}")
    if output.finish_reason not in (None, *FINISH_REASONS):
        raise ValueError(
            f"{name}: expected {', '.join(FINISH_REASONS)} or None as finish_reason, got {output.finish_reason!r:.80}"
        )


def _resume(request: Request, output: CompletionOutput, tokenizer: Any) -> TokenSequence:
    sequence = TokenSequence(request, output.index, request.prompt_token_ids.tolist())
    if output.finish_reason not in (None, "abort"):
        sequence.token_ids += output.token_ids
        sequence.finish_reason, sequence.stop_reason = output.finish_reason, output.stop_reason
    else:
        prepare_sampling(sequence, tokenizer)
        _replay(sequence, output.token_ids)
    sequence.num_resumed = sequence.num_streamed = len(output.token_ids)
    sequence.cumulative_logprob = output.cumulative_logprob or 0.0
    if sequence.detokenizer is not None:
        sequence.num_resumed_characters = len(sequence.detokenizer.delta())
    return sequence


def _replay(sequence: TokenSequence, token_ids: Sequence[int]) -> None:
    state = sequence.sampling
    grammar = None if state is None else state.grammar
    for number, token_id in enumerate(token_ids, start=1):
        append_token(sequence, token_id)
        if grammar is not None and grammar.failure is not None:
            raise ValueError(f"resume: sample {sequence.index}: token {number} is not what structured_outputs allow")
        if sequence.finish_reason is not None and number < len(token_ids):
            raise ValueError(
                f"resume: sample {sequence.index}: expected {number} tokens, with which it had ended, got {len(token_ids)}"
            )
    if grammar is not None:
        grammar.budget.discard_step()
