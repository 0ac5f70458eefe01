"""The blocks that running groups will still need, which admission leaves free."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.scheduler_driver import SchedulerDriver, prompt, warm

from radixkv.cache import PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.admission import Admission
from radixkv.scheduling.decode_growth import DecodeGrowth
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence


def test_admission_counts_the_growth_of_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The count that is updated while a step admits equals a count of all running groups from scratch."""
    checks = 0
    check = Admission._require_growth

    def check_anew(admission: Admission, group: SequenceGroup, num_cached: int = 0, num_more_blocks: int = 0) -> None:
        nonlocal checks
        checks += 1
        running = DecodeGrowth(admission._running, 4, 32)
        assert admission._num_admissible_seqs == admission._max_num_seqs - running.num_seqs
        try:
            check(admission, group, num_cached, num_more_blocks)
        finally:
            assert admission._growth is not None
            anew = DecodeGrowth(admission._running, 4, 32)
            anew.add(group, num_cached)
            assert (admission._growth.num_blocks, admission._growth.num_seqs) == (anew.num_blocks, anew.num_seqs)

    monkeypatch.setattr(Admission, "_require_growth", check_anew)
    driver = SchedulerDriver(num_blocks=24, block_size=4, budget=32, max_num_seqs=8)
    for number in range(40):
        driver.add([number, *range(number % 9)], max_new=3 + number % 11, n=1 + number % 3)
    driver.run()
    assert checks > 40
    assert driver.num_free_seqs == 8


def test_growth_is_bounded_by_what_each_group_may_still_generate() -> None:
    cache = PrefixCache(100, 4)
    request = Request("a", None, np.arange(6, dtype=np.int32), SamplingParams(), 0, 50, frozenset())
    sequence = TokenSequence(request, 0, list(range(6)), cache.open(range(6)))
    cache.reserve(sequence.table, 6)
    request.sequences = [sequence]
    group = SequenceGroup(request, [sequence], request.prompt_token_ids)
    # Six pending tokens take one step of up to 31. Twice that plus a block makes 6 tokens, the last of them in no slot.
    assert DecodeGrowth([group], 4, 32).num_blocks == -(-(6 + 6 - 1) // 4) - 2
    sequence.num_computed = 5
    assert DecodeGrowth([group], 4, 32).num_blocks == -(-(6 + 4 - 1) // 4) - 2
    request.max_new_tokens = 3  # two of them are computed, and fit into the second block
    assert DecodeGrowth([group], 4, 32).num_blocks == 0
    assert DecodeGrowth([group, group], 4, 32).num_seqs == 2


def test_what_did_not_fit_is_not_counted_among_what_runs() -> None:
    """Its long prompt would have taken so many steps that nothing behind it fitted, either."""
    driver = SchedulerDriver(num_blocks=64, budget=4)
    driver.add(prompt(4), max_new=200)
    driver.step()
    large, small = driver.add(prompt(240)), driver.add(prompt(2), max_new=100)
    driver.step()
    assert large not in driver.admitted
    assert small in driver.admitted
    driver.run()


@pytest.mark.parametrize("seed", range(6))
def test_beside_pins_nothing_is_preempted_twice_without_a_token_in_between(seed: int) -> None:
    """Pins take blocks that were counted on when the running groups were admitted."""
    rng = random.Random(seed)
    driver = SchedulerDriver(num_blocks=40, budget=rng.choice([8, 32]), max_num_seqs=8)
    for _ in range(30):
        driver.add(prompt(rng.randint(1, 30)), max_new=rng.randint(1, 40), n=rng.choice([1, 1, 2, 4]))
    num_tokens: dict[SequenceGroup, int] = {}  # when it was last preempted
    num_pinned = 0
    while driver.has_work:
        running = list(driver.scheduler.running)
        driver.step()
        waiting = set(driver.scheduler.waiting)
        for group in running:
            if group in waiting:
                assert len(group.prefill_token_ids) > num_tokens.get(group, 0)
                num_tokens[group] = len(group.prefill_token_ids)
        if num_pinned < 14 and rng.random() < 0.1:
            num_pinned += driver.cache.pin(rng.choice(driver.admitted).prompt_token_ids).num_tokens // 4
    assert num_tokens
    assert num_pinned


def test_what_lacks_its_next_block_beside_pins_leaves_an_older_prompt_in_progress_alone() -> None:
    driver = SchedulerDriver(num_blocks=40, budget=8)
    pinned = prompt(80)
    warm(driver, pinned)
    older = driver.add(prompt(72))
    driver.step()
    younger = driver.add(prompt(3), max_new=40)
    driver.step()
    driver.cache.pin(pinned)
    while younger not in driver.preempted:
        num_computed = older.sequences[0].num_computed
        driver.step()
    assert older.sequences[0].num_pending > 1
    assert older.sequences[0].num_computed == num_computed + 8
    driver.run()
    assert driver.preempted == [younger]
