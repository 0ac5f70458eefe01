"""Requests that can never fit are refused, those that no block is left for fail, and no others do."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from support.model_zoo import VOCAB_SIZE
from support.prompt_sets import GREEDY, tokens_of
from support.tiny_engine import add, assert_empty, tiny

from radixkv import BeamSearchParams, SamplingParams
from radixkv.errors import NoBlocksLeftError, RequestTooLargeError


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], GREEDY, "non-empty"),
        ([[3], [4, 5]], GREEDY, "prompt_token_ids: expected a list of token ids"),
        ([VOCAB_SIZE], GREEDY, f"{VOCAB_SIZE} is outside the vocabulary"),
        ([-1], GREEDY, "-1 is outside"),
        (
            [3] * 65,
            GREEDY,
            "65 tokens > 64 maximum; a sequence has at most 65, of which at least one is to be generated",
        ),
        ([3], SamplingParams(n=9), "n: expected at most max_num_seqs=8 sequences, got 9"),
        ([3], BeamSearchParams(9, 4), "beam_width: expected at most max_num_seqs=8"),
        ([3], BeamSearchParams(7, 4), "beam_width: expected at most max_num_batched_tokens=6, .* got 7"),
        (
            [3] * 40,
            BeamSearchParams(4, 12),
            "need 22 blocks of 4 tokens, and there are 16: ask for less, or raise kv_cache_memory_bytes or num_blocks$",
        ),
        ([3], SamplingParams(logit_bias={VOCAB_SIZE: 1.0}), "logit_bias"),
        ([3], BeamSearchParams(2, 4, logprobs=VOCAB_SIZE + 1), f"logprobs: expected at most {VOCAB_SIZE}, got"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(
    prompt: Any, params: SamplingParams | BeamSearchParams, message: str
) -> None:
    llm = tiny(num_blocks=16, max_num_seqs=8, max_num_batched_tokens=6)
    inputs = [{"prompt_token_ids": [5, 6]}, {"prompt_token_ids": prompt}]
    with pytest.raises(ValueError, match=message):
        if isinstance(params, BeamSearchParams):
            llm.beam_search(inputs, params)
        else:
            llm.generate(inputs, params, use_tqdm=False)
    assert llm.engine.cache.stats.queried_tokens == 0
    assert_empty(llm)
    assert issubclass(RequestTooLargeError, ValueError)


def test_a_request_that_fits_exactly_is_answered_again_and_again() -> None:
    llm = tiny(num_blocks=16)
    prompt = {"prompt_token_ids": list(range(3, 48))}
    first = tokens_of(llm, [prompt])
    for _ in range(3):
        assert tokens_of(llm, [prompt]) == first


def needs(num_needed: int, num_available: int, num_blocks: int) -> str:
    """A pattern of the error where only pins hold blocks."""
    return (
        rf"^request '\d+' needs {num_needed} blocks besides what is cached of it, and only {num_available} of {num_blocks} "
        f"can be had, because {num_blocks - num_available} are pinned: unpin prefixes, ask for less, or raise"
    )


def test_a_request_starved_by_pins_fails_and_the_rest_go_on() -> None:
    llm = tiny(num_blocks=16)
    tokens_of(llm, [{"prompt_token_ids": list(range(3, 35))}])
    pin = llm.engine.cache.pin(list(range(3, 35)))
    with pytest.raises(NoBlocksLeftError, match=needs(10, 8, 16)):
        llm.generate({"prompt_token_ids": list(range(50, 90))}, GREEDY, use_tqdm=False)
    assert len(tokens_of(llm, [{"prompt_token_ids": [7, 8]}])) == 1
    llm.engine.cache.release(pin)
    assert_empty(llm)


def test_beams_whose_tails_do_not_fit_beside_pins_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """They preempted themselves when they parted, once a step and without an end, and whatever waited starved."""
    llm = tiny(block_size=16, num_blocks=4)
    pin = llm.pin({"prompt_token_ids": [*range(10, 42)]})
    params = BeamSearchParams(beam_width=3, max_tokens=3, ignore_eos=True)
    steps, step = itertools.count(), llm.engine.step

    def bounded_step() -> Any:
        assert next(steps) < 50
        return step()

    monkeypatch.setattr(llm.engine, "step", bounded_step)
    with pytest.raises(NoBlocksLeftError, match=needs(3, 2, 4)):
        llm.beam_search({"prompt_token_ids": [5, 6, 7]}, params)
    llm.unpin(pin)
    assert len(llm.beam_search({"prompt_token_ids": [5, 6, 7]}, params)[0].sequences) == 3
    assert_empty(llm)


def test_what_was_not_tried_is_not_failed_for_lack_of_blocks() -> None:
    """A group that has begun its answer and does not fit is the only one tried; those behind it may fit later."""
    llm = tiny(num_blocks=16, max_num_seqs=4, max_num_batched_tokens=64, async_scheduling=False)
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    first = add(engine, "first", range(40, 52), params)
    second = add(engine, "second", range(60, 72), params)
    pin = None
    failed = []
    while engine.has_unfinished_requests:
        failed += [request for request in engine.step() if request.failure is not None]
        if engine.num_steps == 3 and engine.unfinished_request("late") is None:
            add(engine, "late", range(90, 98), params)
        if pin is None and any(group.request is second for group in engine.scheduler.waiting):
            pin = engine.cache.pin([*second.prompt_token_ids.tolist(), *second.sequences[0].output_token_ids])
    assert pin is not None
    assert failed[0] is first
    assert second not in failed
    assert len(second.sequences[0].output_token_ids) == 40
