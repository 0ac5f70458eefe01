"""Requests whose prefix another one is computing wait for it, if it will be cached, and only so long."""

from __future__ import annotations

import numpy as np
import pytest
from support.scheduler_driver import STEMS, SchedulerDriver, numbers, prompt, steps_to_first_token, tail

from radixkv.scheduling.in_flight_prefixes import InFlightPrefix, InFlightPrefixes
from radixkv.scheduling.request import Request


def test_a_prompt_that_reads_nothing_does_not_wait_for_one_that_computes_its_prefix() -> None:
    """It used to wait until the other was computed, and then computed everything itself."""
    driver = SchedulerDriver(budget=24, max_num_seqs=4, num_blocks=200)
    long = [token for stem in range(4) for token in range(1000 * stem, 1000 * stem + 40)]
    driver.add(long)
    driver.steps(6)  # its last 16 tokens leave 8 of a step to others
    waits = driver.add([*long, 1])
    reads_nothing = driver.add([*long, 2], prompt_logprobs=0)
    driver.step()
    assert reads_nothing in driver.admitted
    assert waits not in driver.admitted
    driver.run()


def test_a_short_prompt_that_arrives_several_times_at_once_is_computed_once() -> None:
    """A step has room for all of them."""
    driver = SchedulerDriver(budget=256)
    for end in range(4):
        driver.add([*STEMS[0], end], max_new=1)
    driver.run()
    assert driver.num_computed_tokens == 40 + 4


def test_what_waits_for_a_prefix_in_progress_is_passed_by_others_only_so_often() -> None:
    """The waiting group's prefix takes forty steps; without a bound, others would be admitted all that time."""
    driver = SchedulerDriver(budget=8, max_num_seqs=4, max_overtaken=2, num_blocks=400)
    long = [token for stem in range(8) for token in range(1000 * stem, 1000 * stem + 40)]
    owner = driver.add(long)
    driver.step()
    # More urgent ones are computed before the owner, and at most two others may overtake it.
    waits = driver.add([*long, 1])
    for number in range(6):
        driver.add(tail(number, 3))
    driver.run()
    order = numbers(driver.admitted)
    assert order[0] == owner.arrival
    assert order.index(waits.arrival) <= 1 + 2
    assert driver.num_computed_tokens == len(long) + 1 + 6 * 3 + 8 * 3


def test_an_urgent_request_does_not_wait_for_a_less_urgent_prompt_nor_for_its_prefix() -> None:
    driver = SchedulerDriver(budget=8)
    background = driver.add(STEMS[0], priority=1)
    driver.step()
    urgent = driver.add([*STEMS[0], 7], priority=0)
    driver.step()
    assert numbers(driver.admitted) == [0, 1]
    while not urgent.sequences[0].output_token_ids:
        assert background.sequences[0].num_computed == 8
        driver.step()
    driver.run()


def add_a_prompt_without_tokens(driver: SchedulerDriver, tenant: str = "") -> tuple[list[int], Request]:
    """Add a prompt, of which 16 tokens are computed, and an urgent one that leaves it none; its tokens and request."""
    long, urgent = ([token for stem in stems for token in stem] for stems in (STEMS, reversed(STEMS)))
    owner = driver.add(long, tenant=tenant)
    driver.step()
    driver.add([7, *urgent], tenant=tenant, priority=-1)
    driver.step()
    return long, owner


def test_a_short_prompt_does_not_wait_for_a_prefix_whose_owner_gets_no_tokens() -> None:
    """It waited until an urgent long prompt was computed, which left half of each step to short ones, the owner nothing."""
    driver = SchedulerDriver(budget=16)
    long, owner = add_a_prompt_without_tokens(driver)
    short = [driver.add([*long[:20], end]) for end in (1, 2)]
    driver.step()
    assert owner.sequences[0].num_computed == 16
    assert short[0] in driver.admitted
    assert short[1] not in driver.admitted  # for the first one's prefix it does wait
    driver.step()
    assert short[1] in driver.admitted
    driver.run()


def beside_a_prompt_without_tokens(num_common: int) -> tuple[SchedulerDriver, Request]:
    """No slot is free, a prompt of which 16 tokens are cached gets no tokens, and another tenant's request begins like it."""
    driver = SchedulerDriver(budget=16, max_num_seqs=4)
    long, _ = add_a_prompt_without_tokens(driver, tenant="a")
    driver.add_several(2, 3, tenant="c", max_new=100)
    driver.steps(2)
    return driver, driver.add([*long[:num_common], 1], tenant="b")


def test_nothing_is_preempted_for_what_would_compute_the_prefix_of_a_prompt_without_tokens() -> None:
    """It did, and the prefix was computed twice, or the preempted group started anew in the same step."""
    driver, waits = beside_a_prompt_without_tokens(120)
    driver.step()
    assert waits not in driver.admitted
    driver.run()
    assert driver.scheduler.num_preemptions == 0
    assert driver.num_computed_tokens == (120 + 3) + (121 + 3) + (1 + 3) + 2 * (3 + 99)


def test_a_short_prompt_for_which_others_are_preempted_starts_although_less_is_left_than_in_the_step_before() -> None:
    driver, short = beside_a_prompt_without_tokens(23)
    driver.budget = driver.scheduler._max_num_batched_tokens = 8
    driver.step()
    assert len(driver.preempted) == 1
    assert short in driver.admitted


def test_what_waits_for_a_prompt_without_tokens_starts_once_others_have_computed_its_prefix() -> None:
    driver = SchedulerDriver(budget=16)
    long, owner = add_a_prompt_without_tokens(driver)
    waits = driver.add([*long, 1])
    driver.step()
    assert waits not in driver.admitted
    steps_to_first_token(driver, driver.add(long, priority=-2))
    driver.step()
    assert owner.sequences[0].num_computed == 16
    assert waits in driver.admitted


def test_what_others_have_computed_of_a_prompt_without_tokens_is_counted_before_preemption() -> None:
    """It was that of the step before, if that had asked for it: so who started depended on who had been looked at."""
    driver = SchedulerDriver(budget=16)
    driver.add(range(40))
    driver.step()
    (owner,) = driver.scheduler.running
    prefixes = InFlightPrefixes(driver.cache)
    prefixes.look_at([owner])
    prefixes.note_stalled(owner, num_tokens_left=8)
    assert prefixes.is_in_flight(InFlightPrefix(owner, 32))
    table = driver.cache.open_fill(np.arange(28, dtype=np.int32))
    driver.cache.reserve(table, 28)
    driver.cache.append(table, range(16, 28))
    prefixes.look_at([owner])
    assert not prefixes.is_in_flight(InFlightPrefix(owner, 32))


def test_what_waits_for_a_prefix_waits_for_its_last_token_too() -> None:
    """A chunk left one token of the owner's prompt, and what waited computed that token's block again."""
    driver = SchedulerDriver(budget=21)
    text = list(range(64))
    owner = driver.add(text)
    driver.step()
    waits = driver.add([*text, 7, 8])
    driver.steps(2)
    assert owner.sequences[0].num_computed == 63
    driver.step()
    assert waits not in driver.admitted
    driver.run()


def test_what_waits_for_a_prefix_waits_for_the_rest_of_a_block_too() -> None:
    """A chunk ended inside a block, and what shares the prompt no further than that block computed it again."""
    driver = SchedulerDriver(budget=21)
    text = list(range(64))
    driver.add(text)
    driver.step()
    waits = driver.add([*text[:25], 7])
    driver.step()
    assert waits not in driver.admitted
    driver.step()
    assert waits in driver.admitted
    driver.run()
    assert driver.num_computed_tokens == (64 + 3) + (1 + 3)


def test_what_waits_for_a_prefix_starts_in_the_step_after_its_last_block_is_computed() -> None:
    driver = SchedulerDriver(budget=20)
    text = list(range(64))
    owner = driver.add(text)
    driver.step()
    waits = driver.add([*text[:40], 7])
    driver.step()
    assert waits not in driver.admitted
    assert owner.sequences[0].num_computed == 40
    driver.step()
    assert waits in driver.admitted


def test_a_prompt_does_not_wait_for_the_block_of_its_own_last_token() -> None:
    """That token is computed in any case."""
    driver = SchedulerDriver(budget=20)
    text = list(range(64))
    driver.add(text)
    driver.step()
    short = driver.add(text[:24])
    driver.step()
    assert short in driver.admitted


def test_nothing_waits_for_a_prefix_that_will_not_be_cached() -> None:
    driver = SchedulerDriver(budget=32)
    text = list(range(40))
    driver.add(text, write_cache=False)
    driver.step()
    second = driver.add(text)
    driver.step()
    assert second in driver.admitted


@pytest.mark.parametrize("namespace", [None, "ann"])
def test_nothing_waits_for_a_prefix_that_was_cleared_while_it_was_computed(namespace: str | None) -> None:
    """It waited until all of the prefix had been computed, and then computed all of it again."""
    driver = SchedulerDriver(budget=16)
    text = list(range(40))
    driver.add(text, namespace="ann")
    driver.step()
    waits, too = (driver.add([*text, end], namespace="ann") for end in (1, 2))
    driver.step()
    assert waits not in driver.admitted
    driver.cache.clear(namespace)
    driver.step()
    assert waits in driver.admitted
    assert too not in driver.admitted
    driver.run()
    assert driver.num_computed_tokens == (40 + 3) + (41 + 3) + (1 + 3)


def test_what_did_not_fit_is_tried_again_once_another_has_its_prefix() -> None:
    """As many ran as when it had not fitted, so nothing seemed to have changed, and another tenant's was preempted."""
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=4)
    ends, goes_on = driver.add(prompt(100), max_new=200), driver.add(prompt(8), max_new=200)
    driver.steps(5)
    stem = prompt(100)
    waits = driver.add([*stem, *prompt(60)], tenant="b")
    driver.step()
    computes_prefix = driver.add(stem, max_new=100, tenant="c")
    driver.steps(2)
    driver.abort(ends)
    driver.steps(5)
    assert driver.admitted == [ends, goes_on, computes_prefix, waits]
    assert driver.scheduler.num_preemptions == 0
    driver.run()
