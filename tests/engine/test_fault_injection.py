"""Each of the engine's requests for blocks is refused once: users' requests wait or fail by name, and nothing is lost."""

from __future__ import annotations

import pytest
from support.failing_store import FailingOnce
from support.model_zoo import VOCAB_SIZE
from support.tiny_engine import add, assert_empty, finish, raising_at, tiny

from radixkv import LLM, BeamSearchParams, SamplingParams
from radixkv.engine import executor
from radixkv.errors import NoBlocksLeftError

PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(n=3, max_tokens=7, seed=1, ignore_eos=True),
    BeamSearchParams(2, 6, ignore_eos=True),
]
STEM = [(7 * i) % (VOCAB_SIZE - 3) + 3 for i in range(22)]


def answers(llm: LLM) -> dict[str, list[list[int]] | None]:
    """What each request generated; None where it failed for want of blocks. Runs step by step, as a server would."""
    requests = []
    for number, params in enumerate(PARAMS):
        requests.append(add(llm.engine, f"{number}", [*STEM, 3 + number, 4], params))
    while llm.engine.has_unfinished_requests:
        llm.engine.step()
        llm.engine.cache.check()
    result: dict[str, list[list[int]] | None] = {}
    for request in requests:
        assert request.failure is None or isinstance(request.failure, NoBlocksLeftError)
        done = None if request.failure else [sequence.output_token_ids for sequence in request.sequences]
        if request.beam_search is not None and done is not None:
            done = [beam.token_ids for beam in request.beam_search.results()]
        result[request.request_id] = done
    return result


def test_a_refusal_changes_no_token_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = tiny(num_blocks=40, max_num_batched_tokens=16)
    with monkeypatch.context() as patch:
        calls = FailingOnce(patch, 0)
        expected = answers(llm)
    assert calls.num_calls > 10
    assert_empty(llm)
    for fails_at in range(1, calls.num_calls + 1):
        with monkeypatch.context() as patch:
            FailingOnce(patch, fails_at)
            found = answers(llm)
        for name, tokens in found.items():
            assert tokens is None or tokens == expected[name], f"refusal {fails_at}"
        assert_empty(llm)


def test_samples_that_cannot_begin_leave_no_table_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind the one that failed kept their blocks for ever."""
    llm = tiny(num_blocks=40)
    fails_at_third = raising_at(2, MemoryError("no memory for a sampler"), executor.prepare_sampling)
    monkeypatch.setattr(executor, "prepare_sampling", fails_at_third)
    params = SamplingParams(n=4, max_tokens=3, seed=1)
    with pytest.raises(MemoryError, match="no memory for a sampler"):
        llm.generate({"prompt_token_ids": STEM}, params, use_tqdm=False)
    assert_empty(llm)


@pytest.mark.parametrize("params", PARAMS[::2])
def test_a_request_that_cannot_be_admitted_leaves_no_table_open(
    params: SamplingParams | BeamSearchParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each try opened tables anew, and those of the try before kept their blocks for ever."""
    llm = tiny(num_blocks=40)
    engine, cache = llm.engine, llm.engine.cache
    answers(llm)  # its tables hold cached blocks from the start
    add(engine, "request", STEM, params)
    for method in ("open", "reserve", "require"):
        with monkeypatch.context() as patch:
            patch.setattr(cache, method, raising_at(1, MemoryError("planted"), getattr(cache, method)))
            with pytest.raises(MemoryError, match="planted"):
                engine.step()
        assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks
    finish(engine)
    assert_empty(llm)


def test_beams_that_cannot_all_fork_leave_no_table_open(monkeypatch: pytest.MonkeyPatch) -> None:
    """The forks of the beams before the one that failed kept their blocks for ever."""
    llm = tiny(num_blocks=80)
    params, beams = BeamSearchParams(6, 8, ignore_eos=True), None
    cache, fork, num_forks = llm.engine.cache, llm.engine.cache.fork, 0
    while beams is None:
        monkeypatch.setattr(cache, "fork", raising_at(num_forks + 1, MemoryError(), fork))
        try:
            beams = llm.beam_search({"prompt_token_ids": STEM}, params)
        except MemoryError:
            num_forks += 1
        assert_empty(llm)
    assert num_forks > 8, "in no step, several beams forked"
