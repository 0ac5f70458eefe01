"""The numbers that an engine's thread takes after each step and each call."""

from __future__ import annotations

import pytest
from support.prompt_sets import shared_prefix_prompts
from support.tiny_engine import add, tiny

from radixkv import SamplingParams
from radixkv.engine.stats import engine_stats
from radixkv.scheduling.waiting_queue import WaitingQueue


def test_requests_that_wait_are_counted_without_going_through_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With thousands waiting, that took longer than a step, and aborting them all took time that grew with its square."""
    engine = tiny(max_num_seqs=3).engine
    for number, prompt in enumerate(shared_prefix_prompts(1, 6)):
        params = SamplingParams(n=2 if number == 0 else 1, temperature=1.0, max_tokens=8, ignore_eos=True)
        add(engine, f"{number}", prompt["prompt_token_ids"], params)
    monkeypatch.delattr(WaitingQueue, "__iter__")

    def counts() -> tuple[int, int]:
        stats = engine_stats(engine)
        return stats.num_running, stats.num_waiting

    assert counts() == (0, 6)
    while len(engine.scheduler.running) < 3:  # two samples of one request, and another request
        engine.step()
    assert counts() == (2, 4)
    engine.abort("5")
    engine.abort("0")
    assert counts() == (1, 3)
    while engine.has_unfinished_requests:
        engine.step()
        assert sum(counts()) == engine.num_unfinished_requests
    assert counts() == (0, 0)


def test_queued_tokens_are_those_of_prompts_that_wait_or_are_in_progress() -> None:
    engine = tiny(max_num_batched_tokens=8, async_scheduling=False).engine
    for first, length in ((3, 20), (100, 7)):
        add(engine, f"{first}", range(first, first + length), SamplingParams(max_tokens=8, ignore_eos=True))

    def counts() -> tuple[int, int, int]:
        stats = engine_stats(engine)
        return stats.num_queued_tokens, stats.num_queued, stats.num_decoding

    assert counts() == (27, 2, 0)
    # Of the first prompt 8, 8 and 4 tokens; beside those 4, as many of the second one.
    for expected in ((12 + 7, 2, 0), (4 + 7, 2, 0), (3, 1, 1), (0, 0, 2)):
        engine.step()
        assert counts() == expected
    assert engine_stats(engine).last_batch == (2, 4)
    engine.abort("3")
    assert counts() == (0, 0, 1)
