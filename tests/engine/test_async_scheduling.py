"""Steps that are launched before the last one's tokens are known give the same tokens, whatever becomes known late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from support.drafting_engines import SMALL, Work, answers, work
from support.model_zoo import build_supported
from support.tiny_engine import add, finish

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.engine import output_processor
from radixkv.sampling import sampler


@pytest.fixture(scope="module")
def engines() -> tuple[LLM, LLM]:
    """The same model without and with async scheduling, with few slots, and so few blocks that some are preempted."""
    return tuple(LLM(build_supported("llama"), async_scheduling=kind, **SMALL) for kind in (False, True))  # type: ignore[return-value]


@settings(max_examples=40, deadline=None)
@given(requests=work())
def test_tokens_are_those_of_one_step_at_a_time(engines: tuple[LLM, LLM], requests: Work) -> None:
    in_order, ahead = (answers(llm, requests) for llm in engines)
    assert ahead == in_order
    assert not any(llm.engine.has_unfinished_requests for llm in engines)


def test_the_next_step_is_launched_before_tokens_are_fetched(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = engines[1]
    llm.reset_prefix_cache()
    events: list[str] = []
    run, fetch = llm.engine._runner.run, sampler.InFlightTokens.fetch

    def note_run(*arguments: Any) -> torch.Tensor:
        events.append("launch")
        result: torch.Tensor = run(*arguments)
        return result

    def note_fetch(tokens: sampler.InFlightTokens) -> list[int]:
        events.append("fetch")
        return fetch(tokens)

    monkeypatch.setattr(llm.engine._runner, "run", note_run)
    monkeypatch.setattr(sampler.InFlightTokens, "fetch", note_fetch)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    llm.generate({"prompt_token_ids": [5, 6, 7]}, params, use_tqdm=False)
    assert events == ["launch", "launch", "fetch", "launch", "fetch", "launch", "fetch", "fetch"]


def test_abort_between_launch_and_take(engines: tuple[LLM, LLM]) -> None:
    llm = engines[1]
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)
    for steps in range(1, 8):
        llm.reset_prefix_cache()
        for name in ("kept", "aborted"):
            add(engine, name, [5, 6, 7, 8, 9], params)
        for _ in range(steps):
            engine.step()
        assert engine.abort("aborted")
        engine.cache.check()
        finish(engine)
        engine.cache.check()
        assert llm.reset_prefix_cache()


def test_a_batch_in_flight_is_not_lost_when_scheduling_fails(
    engines: tuple[LLM, LLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch's tokens used to be never fetched: their placeholders were computed with, and another request failed."""
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9]}
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = engines[0].generate(prompt, params)[0].outputs[0].token_ids
    engine = engines[1].engine
    request = add(engine, "one", prompt["prompt_token_ids"], params)
    for _ in range(3):
        engine.step()

    def fail() -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", fail)
        with pytest.raises(MemoryError):
            engine.step()
    finish(engine)
    assert request.failure is None
    assert request.sequences[0].output_token_ids == expected
    engine.cache.check()


@pytest.mark.parametrize("fails", ["launch", "processing"])
def test_a_crash_fails_the_requests_of_one_batch_and_not_those_of_the_other(
    engines: tuple[LLM, LLM], fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step launches a batch and processes the one before: whichever crashed, both used to fail."""
    prompts = {"before": [5, 6, 7, 8, 9], "both": [8, 6, 7, 5, 3], "after": [9, 8, 7, 6, 5]}
    lengths = {"before": 1, "both": 9, "after": 9}
    params = {name: SamplingParams(temperature=0.0, max_tokens=lengths[name], ignore_eos=True) for name in prompts}
    expected = {
        name: engines[0].generate({"prompt_token_ids": prompts[name]}, params[name])[0].outputs[0].token_ids
        for name in prompts
    }
    llm = engines[1]
    llm.reset_prefix_cache()
    engine = llm.engine

    def planted(*_: object) -> None:
        raise ZeroDivisionError("planted")

    requests = {name: add(engine, name, prompts[name], params[name]) for name in ("before", "both")}
    engine.step()
    requests["after"] = add(engine, "after", prompts["after"], params["after"])
    with monkeypatch.context() as patch:
        if fails == "launch":
            patch.setattr(engine._runner, "run", planted)
        else:
            patch.setattr(output_processor, "append_token", planted)
        engine.step()
    engine.cache.check()
    finish(engine)
    survives = "before" if fails == "launch" else "after"
    for name, request in requests.items():
        if name == survives:
            assert request.failure is None
            assert request.sequences[0].output_token_ids == expected[name]
        else:
            assert isinstance(request.failure, ZeroDivisionError)
    assert llm.reset_prefix_cache()


def test_beams_and_samples_side_by_side(engines: tuple[LLM, LLM]) -> None:
    results = []
    for llm in engines:
        llm.reset_prefix_cache()
        engine = llm.engine
        sampled = SamplingParams(temperature=1.0, seed=3, max_tokens=9, ignore_eos=True)
        beams = add(engine, "beams", [5, 6, 7, 8], BeamSearchParams(3, 6, ignore_eos=True))
        sample = add(engine, "sampled", [5, 6, 7, 9], sampled)
        finish(engine)
        assert beams.beam_search is not None
        results.append(([beam.token_ids for beam in beams.beam_search.results()], sample.sequences[0].token_ids))
        engine.cache.check()
    assert results[0] == results[1]


def test_a_block_is_published_when_its_last_token_becomes_known(engines: tuple[LLM, LLM]) -> None:
    """Behind a step in flight, one whose tokens are drawn on the host used to leave a block to the next block's end."""
    llm = engines[1]
    llm.reset_prefix_cache()
    engine, size = llm.engine, llm.engine.cache.block_size
    long = add(engine, "long", [5, 6, 7], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    for number in range(30):
        if number % 3 == 1:
            params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=1)
            add(engine, f"short-{number}", [8 + number, 9], params)
        engine.step()
        (sequence,) = long.sequences
        if sequence.table is not None:
            whole = min(sequence.num_computed, sequence.num_known_tokens) // size * size
            assert sequence.table.num_tokens >= whole
    finish(engine)


@pytest.mark.parametrize("ends", ["by a stop token", "by an abort"])
def test_a_batch_of_which_nothing_is_used_is_not_held(engines: tuple[LLM, LLM], ends: str) -> None:
    """Behind the last request's end, its logits used to take memory until there was another request."""
    llm = engines[1]
    engine = llm.engine
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 6, 7, 8, 9]}
    token_ids = llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, stop_token_ids=token_ids[4:5])
    add(engine, "one", prompt["prompt_token_ids"], params)
    engine.step()
    assert engine._in_flight is not None
    if ends == "by an abort":
        engine.abort("one")
    finish(engine)
    assert engine._in_flight is None
