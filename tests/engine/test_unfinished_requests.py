"""Requests that are aborted, or have nothing left to generate: what their outputs say of each sample."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
from support.tiny_engine import add, assert_empty, finish, tiny

from radixkv import BeamSearchParams, CompletionOutput, SamplingParams
from radixkv.engine.engine import Engine
from radixkv.engine.request_output import beam_output, request_output
from radixkv.prompts import Prompt
from radixkv.scheduling.request import Request

TWO = SamplingParams(n=2, temperature=1.0, seed=3, max_tokens=5, ignore_eos=True)


def resume(engine: Engine, name: str, outputs: Sequence[CompletionOutput]) -> Request:
    request = engine.request_factory.make(name, Prompt([3, 4], resume=list(outputs)), TWO)
    engine.add(request)
    return request


def ends(request: Request) -> list[tuple[int, int, str | None]]:
    """For each sample: its index, how many tokens were generated here, and why it ended."""
    return [(each.index, len(each.token_ids), each.finish_reason) for each in request_output(request).outputs]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_all_samples_are_aborted_before_and_after_they_part(async_scheduling: bool) -> None:
    llm = tiny(async_scheduling=async_scheduling)
    engine = llm.engine
    for num_steps, num_tokens in ((0, 0), (1, int(not async_scheduling)), (3, 3 - async_scheduling)):
        request = add(engine, "samples", [3, 4], TWO)
        for _ in range(num_steps):
            engine.step()
        assert engine.abort("samples")
        assert ends(request) == [(index, num_tokens, "abort") for index in range(2)]
        assert request.finished
        assert_empty(llm)


def test_an_aborted_search_has_no_results() -> None:
    llm = tiny()
    request = add(llm.engine, "beams", [3, 4], BeamSearchParams(3, 5, ignore_eos=True))
    for num_sequences in (1, 3):
        assert len(request.sequences) == num_sequences
        llm.engine.step()
    llm.engine.abort("beams")
    assert len(request.sequences) == 3
    output = beam_output(request, llm.engine.decode_token)
    assert output.aborted
    assert output.sequences == []
    assert_empty(llm)


@pytest.mark.parametrize("num_steps", [0, 2])
def test_of_a_resumed_answer_only_samples_that_go_on_are_aborted(num_steps: int) -> None:
    llm = tiny(async_scheduling=False)
    request = resume(
        llm.engine, "resumed", [CompletionOutput(0, "", [5], finish_reason="stop"), CompletionOutput(1, "", [7])]
    )
    for _ in range(num_steps):
        llm.engine.step()
    assert llm.engine.abort("resumed")
    assert ends(request) == [(0, 0, "stop"), (1, num_steps, "abort")]
    assert_empty(llm)


def test_what_was_resumed_with_nothing_left_ends_in_the_next_step_unless_it_is_aborted() -> None:
    llm = tiny()
    engine = llm.engine
    ended = [CompletionOutput(index, "", [5], finish_reason="stop") for index in range(2)]
    kept, aborted = (resume(engine, name, ended) for name in ("kept", "aborted"))
    assert engine.num_unfinished_requests == 2
    assert engine.abort("aborted")
    assert aborted.finished
    assert not kept.finished
    assert engine.step() == [kept]
    assert ends(kept) == ends(aborted) == [(0, 0, "stop"), (1, 0, "stop")]
    assert not engine.has_unfinished_requests
    assert engine.step() == []


def test_an_id_is_free_again_once_its_request_has_ended() -> None:
    llm = tiny()
    engine = llm.engine
    first = add(engine, "one", [3, 4], TWO)
    with pytest.raises(ValueError, match="request_id 'one' belongs to an unfinished request"):
        add(engine, "one", [3, 4], TWO)
    engine.abort("one")
    second = add(engine, "one", [3, 4], TWO)
    finish(engine)
    assert engine.unfinished_request("one") is None
    assert ends(second) == [(0, 5, "length"), (1, 5, "length")]
    assert ends(first) == [(0, 0, "abort"), (1, 0, "abort")]


def test_what_ends_is_recorded_with_its_first_answer_or_best_beam(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[tuple[object, ...]] = []
    recorder = SimpleNamespace(record=lambda *of_one: recorded.append(of_one))
    engine = tiny().engine
    monkeypatch.setattr(engine._requests, "_recorder", recorder)
    samples = add(engine, "samples", [3, 4], TWO, priority=2)
    beams = add(engine, "beams", [5, 6], BeamSearchParams(2, 4, ignore_eos=True))
    aborted = add(engine, "aborted", [7], TWO)
    engine.step()
    engine.abort("aborted")
    finish(engine)
    assert beams.beam_search is not None
    answers = {samples: samples.sequences[0].output_token_ids, beams: beams.beam_search.results()[0].token_ids}
    assert [len(answer) for answer in answers.values()] == [5, 4]
    assert aborted.finished
    for request, of_one in zip((beams, samples), recorded, strict=True):
        namespace, prompt, answer, arrival, priority = of_one
        assert namespace == ""
        assert prompt is request.prompt_token_ids
        assert (answer, arrival, priority) == (answers[request], request.metrics.arrival_time, request.priority)
