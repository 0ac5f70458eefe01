"""In which order waiting requests are admitted, how often they are overtaken, and what is looked up and counted of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.scheduler_driver import STEMS, SchedulerDriver, numbers, tail, warm

from radixkv import SamplingParams
from radixkv.scheduling.request import Request


def test_the_most_cached_goes_first_and_equals_in_order_of_arrival() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, STEMS[0])
    first = 1
    for number, shared in enumerate([0, 8, 0, 32, 8]):
        driver.add(STEMS[0][:shared] + tail(number, 5))
    driver.run()
    assert [number - first for number in numbers(driver.admitted)] == [3, 1, 4, 0, 2]


def test_the_most_cached_goes_first_beside_another_tenant_that_need_not_be_preempted() -> None:
    driver = SchedulerDriver()
    warm(driver, STEMS[0])
    other = driver.add(tail(0, 8), max_new=30, tenant="other")
    driver.step()
    cold, hot = driver.add(tail(1, 5)), driver.add([*STEMS[0], 1])
    driver.run()
    assert driver.admitted == [other, hot, cold]


def test_of_waiting_prompts_what_is_cached_does_not_count_as_queued() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, STEMS[0])
    waiting, cache = driver.scheduler.waiting, driver.cache
    before = (cache.stats, cache.version)

    def counted(prompt: list[int], **options: Any) -> int:
        num_tokens = waiting.num_uncached_tokens
        driver.add(prompt, **options)
        return waiting.num_uncached_tokens - num_tokens

    assert counted(STEMS[0][:32] + tail(0, 5)) == 5
    assert counted(STEMS[0][:39]) == 1  # for its logits
    assert counted(STEMS[1]) == 40
    assert counted(STEMS[0], namespace="another") == 40
    assert counted(STEMS[0], prompt_logprobs=0) == 40  # cached tokens would have no log-probabilities
    assert (cache.stats, cache.version) == before
    driver.abort(driver.requests[-1])
    assert waiting.num_uncached_tokens == 5 + 1 + 40 + 40
    driver.run()
    assert waiting.num_uncached_tokens == 0


def test_of_a_preempted_answer_what_is_still_cached_does_not_count_as_queued() -> None:
    driver = SchedulerDriver(num_blocks=16, block_size=4, max_num_seqs=2)
    for number in range(2):
        driver.add(tail(number, 24), max_new=30)
    while not driver.preempted:
        driver.step()
    waiting = driver.scheduler.waiting
    (group,) = waiting
    # The other sequence has taken some of its blocks in the same step.
    assert (
        1
        <= waiting.num_uncached_tokens
        <= len(group.prefill_token_ids) - driver.cache.match(group.prefill_token_ids)
        < 24
    )
    driver.run()
    assert waiting.num_uncached_tokens == 0


def test_preempted_answers_go_on_in_order_of_arrival_whatever_is_cached_of_them() -> None:
    driver = SchedulerDriver()
    warm(driver, STEMS[0])
    waiting = driver.scheduler.waiting
    for prompt in (tail(0, 30), STEMS[0][:30]):
        driver.add(prompt)
        (group,) = driver.scheduler.groups_of(driver.requests[-1])
        waiting.remove(group)
        group.started = True
        waiting.add(group)
    assert [group.request for group in waiting.candidates("", look_up=True)] == driver.requests
    assert waiting.num_uncached_tokens == 30 + 1


def test_priorities_come_before_what_is_cached_and_before_age() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, STEMS[0])
    for number, (priority, shared) in enumerate([(1, 32), (0, 0), (1, 0), (-2, 0), (0, 32)]):
        driver.add(STEMS[0][:shared] + tail(number, 5), priority=priority)
    driver.run()
    assert [number - 1 for number in numbers(driver.admitted)] == [3, 4, 1, 0, 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cold_prompt_among_hot_ones_is_overtaken_a_bounded_number_of_times(ahead: bool) -> None:
    """Cached prompts come faster than they are answered: the longest match alone would never take the cold one."""
    driver = SchedulerDriver(max_num_seqs=2, max_overtaken=7, ahead=ahead)
    warm(driver, STEMS[0])
    for number in range(3):
        driver.add(STEMS[0] + tail(number, 3))
    cold = driver.add(tail(99, 30))
    number = 3
    while cold not in driver.admitted:
        driver.add(STEMS[0] + tail(number, 3))
        driver.step()
        number += 1
    assert driver.admitted.index(cold) == 3 + 7
    driver.run()


def test_two_families_that_do_not_fit_together_are_answered_one_after_the_other() -> None:
    """Interleaved arrivals, and a cache that holds one family's stem: order of arrival evicts it every time."""
    computed: dict[int, int] = {}
    for window in (1, 32):
        driver = SchedulerDriver(num_blocks=16, max_num_seqs=1, window=window)
        for number in range(12):
            driver.add(STEMS[number % 2] + tail(number, 4), max_new=2)
        driver.run()
        computed[window] = driver.num_computed_tokens
    # One stem of 40 each, and 4 prompt tokens and 1 of 2 generated ones for each of twelve.
    assert computed[32] == 2 * 40 + 12 * 5
    assert computed[1] > 2 * computed[32]


def test_a_line_that_cannot_move_costs_no_look_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(num_blocks=200, max_num_seqs=2, budget=64)
    calls = {"match": 0, "open": 0}
    for name in calls:
        original = getattr(driver.cache, name)

        def counted(*args: object, name: str = name, original: object = original, **options: object) -> object:
            calls[name] += 1
            return original(*args, **options)  # type: ignore[operator]

        monkeypatch.setattr(driver.cache, name, counted)
    for number in range(2):
        driver.add(tail(number, 8), max_new=200)
    driver.step()
    for number in range(100):
        driver.add(tail(2 + number, 8), max_new=4)
    before = dict(calls)
    driver.steps(150)
    assert calls == before, "as many sequences run as may: none can be admitted"
    while len(driver.admitted) == 2:
        driver.step()
    assert calls["match"] - before["match"] <= 32 + 32


def test_a_prompt_is_looked_up_again_only_when_the_tree_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver()
    warm(driver, STEMS[0])
    queue, cache = driver.scheduler.waiting, driver.cache
    looked_up: list[int] = []
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda tokens, namespace: looked_up.append(1) or match(tokens, namespace))
    for number in range(50):
        driver.add(STEMS[0] + tail(number, 3))
    assert len(looked_up) == 50
    queue.candidates("", look_up=True)
    assert len(looked_up) == 50
    cache.clear()
    for _ in range(2):
        queue.candidates("", look_up=True)
        assert len(looked_up) == 50 + 32
    # What the first 32 lack now, and what the others lacked when they came.
    assert queue.num_uncached_tokens == 32 * 43 + 18 * 3


def test_a_request_that_was_never_queued_is_no_other_one_that_is() -> None:
    """One that ended elsewhere has no time of arrival, and used to be taken for the first that arrived: that was removed."""
    driver = SchedulerDriver()
    waiting = driver.add(tail(0, 8))
    other = Request("other", None, np.array(tail(1, 8), np.int32), SamplingParams(), 0, 4, frozenset())
    assert waiting.arrival == other.arrival
    assert driver.scheduler.groups_of(other) == []
    assert [group.request for group in driver.scheduler.groups_of(waiting)] == [waiting]


def test_of_a_tenant_s_groups_that_do_not_fit_only_the_first_is_passed_by_others() -> None:
    driver = SchedulerDriver(num_blocks=20, max_overtaken=1)
    driver.add(tail(0, 30), max_new=8)
    driver.step()
    large = [driver.scheduler.groups_of(driver.add(tail(number, 60)))[0] for number in (1, 2)]
    driver.add(tail(3, 2), max_new=1, tenant="other")
    driver.scheduler.shares.charge_cost("other", 1000)  # so that it is the turn of the large ones
    driver.step()
    assert [driver.scheduler.waiting.may_be_passed(group) for group in large] == [False, True]
    driver.run()
