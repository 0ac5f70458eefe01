"""Requests that are aborted, and steps that fail, at any moment: nothing leaks, and other requests go on."""

from __future__ import annotations

import pytest
from support.prompt_sets import GREEDY, shared_prefix_prompts, tokens_of
from support.tiny_engine import add, assert_empty, raising_at, tiny

from radixkv import BeamSearchParams, SamplingParams


@pytest.mark.parametrize(
    "params", [SamplingParams(n=3, max_tokens=8), BeamSearchParams(3, 8)], ids=["samples", "beams"]
)
def test_aborting_at_any_step_leaks_nothing(params: SamplingParams | BeamSearchParams) -> None:
    llm = tiny(max_num_batched_tokens=16, num_blocks=70)
    prompts = shared_prefix_prompts(2, 4)
    for steps in range(14):
        for number, prompt in enumerate(prompts):
            add(llm.engine, f"{number}", prompt["prompt_token_ids"], params)
        for _ in range(steps):
            llm.engine.step()
        for number in range(4):
            llm.engine.abort(f"{number}")
            llm.engine.cache.check()
        assert not llm.engine.abort("0")
        assert_empty(llm)


@pytest.mark.parametrize("error", [RuntimeError("the model broke"), KeyboardInterrupt()])
@pytest.mark.parametrize("params", [GREEDY, BeamSearchParams(3, 8)], ids=["greedy", "beams"])
def test_a_model_that_raises_at_any_step_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, params: SamplingParams | BeamSearchParams
) -> None:
    llm = tiny(max_num_batched_tokens=16)
    run = llm.engine._runner.run
    for failing_step in range(8):
        monkeypatch.setattr(llm.engine._runner, "run", raising_at(failing_step + 1, error, run))
        with pytest.raises(type(error)):
            if isinstance(params, BeamSearchParams):
                llm.beam_search(shared_prefix_prompts(2, 3), params)
            else:
                llm.generate(shared_prefix_prompts(2, 3), params, use_tqdm=False)
        monkeypatch.undo()
        assert_empty(llm)
        assert len(tokens_of(llm, shared_prefix_prompts(2, 2))) == 2


def test_other_requests_go_on_after_a_failed_step(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(max_num_seqs=1)
    for number, prompt in enumerate(shared_prefix_prompts(2, 2)):
        add(llm.engine, f"{number}", prompt["prompt_token_ids"], GREEDY)
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine._runner, "run", lambda *arguments: 1 / 0)
        (failed,) = llm.engine.step()
    assert isinstance(failed.failure, ZeroDivisionError)
    finished = []
    while llm.engine.has_unfinished_requests:
        finished += [request for request in llm.engine.step() if request.finished]
    assert [request.request_id for request in finished] == ["1"]
    assert_empty(llm)


def test_a_failed_step_of_another_request_fails_neither_generate_nor_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever ran the step used to get the error, and to lose requests that were only queued."""
    llm = tiny(max_num_seqs=1)
    prompts = shared_prefix_prompts(3, 2)
    expected = [tokens_of(llm, [prompt])[0] for prompt in prompts]
    failing_once = raising_at(1, ZeroDivisionError(), llm.engine._runner.run)
    running, queued = (llm.stream(prompt, GREEDY) for prompt in prompts[:2])
    next(running)
    monkeypatch.setattr(llm.engine._runner, "run", failing_once)
    assert tokens_of(llm, prompts[2:]) == expected[2:]
    assert [token for output in queued for token in output.outputs[0].token_ids] == expected[1]
    with pytest.raises(ZeroDivisionError):
        next(running)
    assert_empty(llm)


def test_leaving_a_stream_early_aborts_it() -> None:
    llm = tiny()
    stream = llm.stream(shared_prefix_prompts(1, 1)[0], GREEDY)
    next(stream)
    stream.close()
    assert_empty(llm)
