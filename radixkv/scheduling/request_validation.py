"""Request validation: whether a request can be run at all, checked before anything is changed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.tokens import MAX_TOKEN_ID
from radixkv.errors import PromptTooLongError, RequestTooLargeError
from radixkv.sampling_params import BeamSearchParams, SamplingParams

if TYPE_CHECKING:
    from radixkv.scheduling.request import Request  # imports torch, which an ingress does without

# Either of them sets how many blocks there are.
_MORE_BLOCKS = "raise kv_cache_memory_bytes or num_blocks"


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine can run at most.

    Attributes:
        num_blocks: of the pool.
        block_size: tokens of each.
        max_num_seqs: sequences side by side.
        max_num_batched_tokens: tokens of a step.
        num_logits: tokens that can be generated, from 0 on: fewer than the vocabulary where the output head is narrower.
    """

    num_blocks: int
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    num_logits: int


def validate_prompt(
    token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int, max_model_len: int, original_max_model_len: int
) -> NDArray[np.int32]:
    """The prompt as int32.

    Args:
        max_model_len, original_max_model_len: as `LoadedModel` has them.

    Raises:
        TypeError, ValueError: what `validate_token_ids` raises.
        PromptTooLongError: not even one token could be generated after them.
    """
    tokens = validate_token_ids(token_ids, vocab_size)
    if tokens.size >= max_model_len:
        bound = ""
        if original_max_model_len > max_model_len:
            bound = f"; the model allows {original_max_model_len}, and memory has no room for them: {_MORE_BLOCKS}"
        raise PromptTooLongError(
            f"prompt_token_ids: {tokens.size} tokens > {max_model_len - 1} maximum; a sequence has at most {max_model_len}, "
            f"of which at least one is to be generated{bound}"
        )
    return tokens


def validate_token_ids(token_ids: Sequence[int] | NDArray[np.int32], vocab_size: int) -> NDArray[np.int32]:
    """A prompt of any length as int32.

    Raises:
        TypeError: ids are not whole numbers.
        ValueError: there are none, or one is outside the vocabulary.
    """
    try:
        tokens = np.asarray(token_ids)
    except ValueError as error:
        raise ValueError(f"prompt_token_ids: expected a list of token ids, got {str(token_ids)[:80]}") from error
    if tokens.ndim != 1 or tokens.size == 0:
        raise ValueError(f"prompt_token_ids: expected a non-empty list of token ids, got {token_ids!r:.80}")
    if not np.issubdtype(tokens.dtype, np.integer):
        # Python's integers may be too large for numpy's.
        large = next((each for each in token_ids if isinstance(each, int) and abs(each) > MAX_TOKEN_ID), None)
        if large is not None:
            _refuse_id(large, vocab_size)
        raise TypeError(f"prompt_token_ids: expected whole numbers, got {token_ids!r:.80}")
    # Python counts booleans as 0 and 1, and numpy does so silently: only those entries are looked at one by one.
    if any(isinstance(token_ids[i], bool | np.bool_) for i in np.flatnonzero(tokens <= 1).tolist()):
        raise TypeError(f"prompt_token_ids: expected whole numbers, got {token_ids!r:.80}")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocab_size:
        _refuse_id(low if low < 0 else high, vocab_size)
    return tokens.astype(np.int32)


def _refuse_id(token_id: int, vocab_size: int) -> NoReturn:
    raise ValueError(f"prompt_token_ids: {token_id} is outside the vocabulary of {vocab_size} tokens")


def validate_logits(request: Request, num_logits: int) -> None:
    """Reject what needs logits that the model does not compute.

    Args:
        num_logits: as `Capacity` has it.

    Raises:
        ValueError: none of the allowed tokens has one, or a prompt token whose log-probability is wanted has none.
    """
    params = request.params
    if not isinstance(params, SamplingParams):
        return
    if params.allowed_token_ids is not None and min(params.allowed_token_ids) >= num_logits:
        raise ValueError(
            f"allowed_token_ids: expected one of the {num_logits} tokens that the model can generate, "
            f"got {params.allowed_token_ids!r:.80}"
        )
    if params.prompt_logprobs is None:
        return
    highest = int(request.prompt_token_ids[1:].max(initial=0))  # the first token gets no log-probability
    if highest >= num_logits:
        raise ValueError(
            f"prompt_logprobs: the model has log-probabilities of {num_logits} tokens, and the prompt has token {highest}"
        )


def validate_capacity(request: Request, capacity: Capacity) -> None:
    """Reject what would not fit into an empty engine.

    Raises:
        RequestTooLargeError: too many concurrent sequences, or too few blocks for all beams; with the figures.
    """
    beams = isinstance(request.params, BeamSearchParams)
    if request.num_seqs > capacity.max_num_seqs:
        name = "beam_width" if beams else "n"
        raise RequestTooLargeError(
            f"{name}: expected at most max_num_seqs={capacity.max_num_seqs} sequences, got {request.num_seqs}"
        )
    if not beams:
        return
    if request.num_seqs > capacity.max_num_batched_tokens:
        raise RequestTooLargeError(
            f"beam_width: expected at most max_num_batched_tokens={capacity.max_num_batched_tokens}, because each beam "
            f"takes a token of every step, got {request.num_seqs}"
        )
    # The last generated token is never computed and takes no slot.
    of_each = -(-(request.num_prompt_tokens + request.max_new_tokens - 1) // capacity.block_size)
    shared = request.num_prompt_tokens // capacity.block_size
    needed = shared + request.num_seqs * (of_each - shared)
    if needed > capacity.num_blocks:
        raise RequestTooLargeError(
            f"{request.num_prompt_tokens} prompt tokens and up to {request.max_new_tokens} new ones of each of "
            f"{request.num_seqs} beams need {needed} blocks of {capacity.block_size} tokens, and there are "
            f"{capacity.num_blocks}: ask for less, or {_MORE_BLOCKS}"
        )
