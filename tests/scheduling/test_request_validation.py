"""Requests that can never be run are refused, and those just within the bounds are not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from radixkv import BeamSearchParams, SamplingParams
from radixkv.errors import PromptTooLongError, RequestTooLargeError
from radixkv.scheduling.request import Request
from radixkv.scheduling.request_validation import Capacity, validate_capacity, validate_logits, validate_prompt

NUM_LOGITS = 10
CAPACITY = Capacity(num_blocks=4, block_size=4, max_num_seqs=3, max_num_batched_tokens=3, num_logits=NUM_LOGITS)


def make(prompt: list[int], params: SamplingParams | BeamSearchParams, max_new_tokens: int = 4) -> Request:
    tokens = np.array(prompt, dtype=np.int32)
    return Request("one", None, tokens, params, 0, max_new_tokens, end_token_ids=frozenset())


@pytest.mark.parametrize(
    ("prompt", "params"),
    [
        ([3], SamplingParams(allowed_token_ids=[12, 9])),
        ([15, 9], SamplingParams(prompt_logprobs=0)),  # the first token gets no log-probability
        ([15], SamplingParams(prompt_logprobs=0)),
        ([3, 15], SamplingParams(logprobs=1)),
        ([3, 15], BeamSearchParams(2, 4)),
    ],
)
def test_tokens_without_logits_may_be_given_where_none_is_needed(
    prompt: list[int], params: SamplingParams | BeamSearchParams
) -> None:
    validate_logits(make(prompt, params), NUM_LOGITS)


def test_what_needs_logits_that_the_model_lacks_is_refused() -> None:
    message = r"^allowed_token_ids: expected one of the 10 tokens that the model can generate, got \[12, 10\]"
    with pytest.raises(ValueError, match=message):
        validate_logits(make([3], SamplingParams(allowed_token_ids=[12, 10])), NUM_LOGITS)
    message = "^prompt_logprobs: the model has log-probabilities of 10 tokens, and the prompt has token 10$"
    with pytest.raises(ValueError, match=message):
        validate_logits(make([15, 10, 3], SamplingParams(prompt_logprobs=0)), NUM_LOGITS)


def test_beams_fit_if_each_has_blocks_beyond_the_whole_ones_of_the_prompt() -> None:
    """Two blocks each for the prompt and three of four new tokens, of which the first one is common."""
    beams = make([1, 2, 3, 4, 5], BeamSearchParams(3, 4), max_new_tokens=4)
    validate_capacity(beams, CAPACITY)
    with pytest.raises(RequestTooLargeError, match="3 beams need 4 blocks of 4 tokens, and there are 3"):
        validate_capacity(beams, replace(CAPACITY, num_blocks=3))
    beams.max_new_tokens = 5
    with pytest.raises(RequestTooLargeError, match="3 beams need 7 blocks of 4 tokens, and there are 4"):
        validate_capacity(beams, CAPACITY)
    with pytest.raises(
        RequestTooLargeError, match=r"^beam_width: expected at most max_num_batched_tokens=2, .* got 3$"
    ):
        validate_capacity(beams, replace(CAPACITY, max_num_batched_tokens=2))


@pytest.mark.parametrize(("params", "name"), [(SamplingParams(n=3), "n"), (BeamSearchParams(3, 1), "beam_width")])
def test_no_more_sequences_than_may_run_at_once_are_accepted(
    params: SamplingParams | BeamSearchParams, name: str
) -> None:
    request = make([3], params, max_new_tokens=1)
    validate_capacity(request, CAPACITY)
    with pytest.raises(RequestTooLargeError, match=f"^{name}: expected at most max_num_seqs=2 sequences, got 3$"):
        validate_capacity(request, replace(CAPACITY, max_num_seqs=2))


def test_samples_need_no_blocks_side_by_side() -> None:
    validate_capacity(make([3] * 12, SamplingParams(n=3), max_new_tokens=4), CAPACITY)


def test_a_prompt_leaves_room_for_one_token() -> None:
    assert validate_prompt([3] * 4, 20, max_model_len=5, original_max_model_len=5).tolist() == [3] * 4
    with pytest.raises(PromptTooLongError, match=r"^prompt_token_ids: 5 tokens > 4 maximum; .* is to be generated$"):
        validate_prompt([3] * 5, 20, max_model_len=5, original_max_model_len=5)
    with pytest.raises(
        PromptTooLongError, match="; the model allows 6, and memory has no room for them: raise kv_cache"
    ):
        validate_prompt([3] * 5, 20, max_model_len=5, original_max_model_len=6)
