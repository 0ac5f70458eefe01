"""What the scheduler promises, without a model; `scheduler_driver` verifies every step."""

from __future__ import annotations

import random
import weakref
from typing import Any

import pytest
from support.scheduler_driver import STEMS, SchedulerDriver, prompt, tail, warm

from radixkv.scheduling.admission import Admission
from radixkv.scheduling.fair_shares import COMPUTED_TOKEN_COST


@pytest.mark.parametrize("max_new", [1, 3])
def test_the_tokens_of_all_samples_are_charged(max_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last chunk brings a first token for each sample, of which only one used to be charged."""
    driver = SchedulerDriver(max_num_seqs=8, budget=6)  # the prompt takes two steps
    charged: list[int] = []
    monkeypatch.setattr(
        driver.scheduler.shares, "charge_generated", lambda tenant, num_tokens: charged.append(num_tokens)
    )
    driver.add(tail(0, 8), n=5, max_new=max_new)
    driver.run()
    assert sum(charged) == 5 * max_new


def test_more_samples_than_a_step_has_tokens_take_several_steps() -> None:
    driver = SchedulerDriver(budget=4, max_num_seqs=8)
    request = driver.add(tail(0, 3), n=6, max_new=5)
    driver.run()
    assert [len(sample.output_token_ids) for sample in request.sequences] == [5] * 6


@pytest.mark.parametrize("long_prompt", [100, 2000])
def test_streams_get_a_token_every_step_while_a_long_prompt_is_computed(long_prompt: int) -> None:
    driver = SchedulerDriver(budget=16, num_blocks=4000)
    streams = [driver.add(tail(number, 5), max_new=1000) for number in range(5)]
    while any(request.sequences[0].num_pending > 1 for request in streams):
        driver.step()
    lengths = [len(request.sequences[0].token_ids) for request in streams]
    long = driver.add(list(range(50_000, 50_000 + long_prompt)))
    steps = 0
    while not long.sequences[0].output_token_ids:
        chunks = driver.step()
        steps += 1
        assert sum(chunk.num_tokens for chunk in chunks) <= 16
        assert [len(request.sequences[0].token_ids) - steps for request in streams] == lengths
    # What the streams leave of each step is the prompt's.
    assert steps == -(-long_prompt // (16 - 5))


def test_short_prompts_do_not_wait_for_the_end_of_a_long_one() -> None:
    driver = SchedulerDriver(budget=16, num_blocks=4000)
    long = driver.add(list(range(50_000, 50_400)))
    driver.step()
    steps = 1
    while long.sequences[0].num_pending > 16:
        short = driver.add(tail(steps, 8), max_new=1)
        before = long.sequences[0].num_computed
        chunks = driver.step()
        steps += 1
        assert short.sequences[0].output_token_ids
        assert long.sequences[0].num_computed - before == 8
        assert sum(chunk.num_tokens for chunk in chunks) == 16
    # Alone it would have taken 25 steps.
    assert steps == 1 + (400 - 16 - 16) // 8
    driver.step()
    assert long.sequences[0].output_token_ids


def test_a_second_long_prompt_waits_for_the_first() -> None:
    """Side by side, both would be late."""
    driver = SchedulerDriver(budget=16, num_blocks=4000)
    first, second = (driver.add(list(range(start, start + 160))) for start in (50_000, 60_000))
    driver.steps(10)
    assert first.sequences[0].output_token_ids
    assert second.sequences[0].num_computed == 0
    driver.run()


def test_of_two_prompts_in_progress_the_one_whose_tenant_was_served_less_goes_on() -> None:
    driver = SchedulerDriver(budget=16)
    first = driver.add(tail(0, 100), tenant="a")
    driver.step()
    second = driver.add(tail(1, 40), tenant="b")
    driver.step()
    driver.scheduler.shares.charge_cost("a", 1000)
    before = first.sequences[0].num_computed
    driver.step()
    assert (first.sequences[0].num_computed, second.sequences[0].num_computed) == (before, 32)
    driver.run()


def test_short_prompts_do_not_wait_behind_a_second_long_one_which_they_pass_only_so_often() -> None:
    """They waited until the first long prompt had ended, although it leaves half of each step to them."""
    driver = SchedulerDriver(budget=16, num_blocks=4000, max_overtaken=2)
    first, second = (driver.add(list(range(start, start + 160))) for start in (50_000, 60_000))
    short = [driver.add(tail(number, 8), max_new=1) for number in range(4)]
    driver.run()
    assert driver.admitted == [first, *short[:2], second, *short[2:]]


@pytest.mark.parametrize("ahead", [False, True])
def test_preemptions_are_bounded_by_what_is_generated(ahead: bool) -> None:
    """Twice as many sequences as blocks allow, each generating ten blocks."""
    driver = SchedulerDriver(num_blocks=64, block_size=4, max_num_seqs=16, budget=64, ahead=ahead)
    for number in range(24):
        driver.add(tail(number, 12), max_new=40)
    driver.run()
    assert 0 < len(driver.preempted) < 24 * 40 // 4
    # Half of all work at most is prompts computed again; here it is far less.
    assert driver.num_computed_tokens < 1.25 * 24 * (12 + 39)


def test_a_preempted_request_resumes_before_new_ones() -> None:
    driver = SchedulerDriver(num_blocks=12, max_num_seqs=3)
    for number in range(2):
        driver.add(tail(number, 8), max_new=32)
    while not driver.preempted:
        driver.step()
    (victim,) = driver.preempted
    assert victim.arrival == 1
    newcomer = driver.add([5], max_new=1)
    while not newcomer.sequences[0].output_token_ids:
        driver.step()
    assert len(victim.sequences[0].output_token_ids) > 10
    driver.run()


def test_when_blocks_run_out_the_least_urgent_is_preempted() -> None:
    driver = SchedulerDriver(num_blocks=12, max_num_seqs=3)
    background = driver.add(tail(0, 8), max_new=32, priority=5)
    driver.add(tail(1, 8), max_new=32, priority=0)
    while not driver.preempted:
        driver.step()
    assert driver.preempted == [background]
    driver.run()


def test_what_does_not_fit_is_passed_by_smaller_ones_only_so_often() -> None:
    driver = SchedulerDriver(num_blocks=20, max_num_seqs=8, max_overtaken=2)
    first = driver.add(tail(0, 30), max_new=8)
    driver.step()
    big = driver.add(tail(1, 60), max_new=2)
    small = [driver.add(tail(2 + number, 2), max_new=2) for number in range(5)]
    driver.run()
    assert driver.admitted == [first, *small[:2], big, *small[2:]]


def test_beside_a_long_prompt_short_ones_start_though_others_wait_for_what_does_not_fit() -> None:
    """What the long one leaves of a step's tokens is too little for the large one, which therefore loses nothing."""
    driver = SchedulerDriver(num_blocks=64, budget=16, max_overtaken=0)
    driver.add(prompt(120), tenant="long")
    driver.step()
    large, short = (driver.add(prompt(length), tenant=tenant) for length, tenant in ((160, "large"), (3, "short")))
    driver.step()
    assert driver.scheduler.admission.first_without_room is driver.scheduler.groups_of(large)[0]
    assert short in driver.admitted
    driver.run()


def test_behind_what_does_not_fit_a_step_tries_few_tenants_for_short_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """With 3,000 tenants, each of 15 prompts in progress had all of them tried: 0.8 s a step."""
    driver = SchedulerDriver(num_blocks=64, budget=16, max_num_seqs=32, max_overtaken=0, window=4)
    for number in range(3):
        driver.add(prompt(40), tenant=f"long {number}")
    driver.steps(3)
    for number in range(40):
        driver.add(prompt(160), tenant=f"large {number}")
    tried: list[str] = []
    admit_first_of = Admission._admit_first_of

    def noted(admission: Admission, tenant: str, *arguments: Any) -> Any:
        tried.append(tenant)
        return admit_first_of(admission, tenant, *arguments)

    monkeypatch.setattr(Admission, "_admit_first_of", noted)
    driver.step()
    assert driver.scheduler.admission.first_without_room is not None
    assert 1 <= len(tried) <= 1 + 4
    driver.run()


@pytest.mark.parametrize("bounds", [{"max_overtaken": 0}, {"window": 1}])
def test_what_does_not_fit_does_not_hold_up_short_prompts_before_it_in_turn(bounds: dict[str, int]) -> None:
    """The large prompt may come before the rest of the long one, while another of the long one's tenant may not."""
    driver = SchedulerDriver(num_blocks=64, budget=16, **bounds)
    driver.add(prompt(4), tenant="large", max_new=100)
    driver.add(prompt(120), tenant="long")
    driver.steps(2)
    large, short = (driver.add(prompt(length), tenant=tenant) for length, tenant in ((190, "large"), (3, "long")))
    shares = driver.scheduler.shares
    shares.charge_cost("large", shares.counter("long") + 1 - shares.counter("large"))
    driver.step()
    assert driver.scheduler.admission.first_without_room is driver.scheduler.groups_of(large)[0]
    assert short in driver.admitted
    driver.run()


def test_a_long_stream_and_a_request_for_many_samples_do_not_stop_admission() -> None:
    """Seven of eight slots used to be idle for as long as the stream went on."""
    driver = SchedulerDriver(max_num_seqs=8)
    driver.add(tail(0, 5), max_new=300)
    driver.step()
    many = driver.add(tail(1, 5), n=8, max_new=2)
    driver.step()
    for number in range(10):
        short = driver.add(tail(2 + number, 5), max_new=1)
        driver.step()
        assert short.sequences[0].output_token_ids
    assert many not in driver.admitted
    driver.run()


def test_what_waits_for_pinned_blocks_starts_when_the_pin_expires_beside_a_long_answer() -> None:
    """It waited until some other request had ended, since nothing that was looked at had changed."""
    now = [0.0]
    driver = SchedulerDriver(num_blocks=20, clock=lambda: now[0])
    warm(driver, tail(0, 40))
    pin = driver.cache.pin(tail(0, 40), ttl=5)
    driver.add(tail(1, 4), max_new=30)
    driver.step()
    waits = driver.add(tail(2, 40), max_new=4)
    driver.steps(3)
    assert waits not in driver.admitted
    now[0] = 5.0
    driver.step()
    assert pin.released
    assert waits in driver.admitted
    driver.run()


def test_what_needs_every_block_starts_once_all_are_there() -> None:
    """And of several without room, it is the first that is named."""
    driver = SchedulerDriver(num_blocks=20)
    warm(driver, tail(0, 40))
    pin = driver.cache.pin(tail(0, 40))
    waits = [driver.add(tail(number, 80), max_new=1) for number in (1, 2)]
    assert driver.scheduler.schedule() == []
    (first,) = driver.scheduler.groups_of(waits[0])
    assert driver.scheduler.admission.first_without_room is first
    driver.cache.release(pin)
    driver.step()
    assert driver.admitted == waits[:1]
    driver.run()


def test_a_request_that_lacks_blocks_is_not_tried_again_until_they_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver(num_blocks=40, max_num_seqs=4, budget=64)
    for number in range(2):
        driver.add(tail(number, 40), max_new=20 + 10 * number)
    driver.step()
    driver.add(tail(2, 100), max_new=4)
    opened: list[int] = []
    original = driver.cache.open
    monkeypatch.setattr(driver.cache, "open", lambda *args, **options: opened.append(1) or original(*args, **options))
    driver.run()
    # Opened on arrival, when the others' prompts are computed, when the first of them is done, and when both are.
    assert len(opened) <= 4


def test_what_did_not_fit_beside_a_prompt_in_progress_is_admitted_when_that_is_computed() -> None:
    """Until then, admission leaves the others blocks for all the steps that the prompt takes."""
    driver = SchedulerDriver(budget=8, num_blocks=84, max_num_seqs=8)
    stream = driver.add(tail(0, 7), max_new=150)
    while not stream.sequences[0].output_token_ids:
        driver.step()
    long = driver.add(list(range(50_000, 50_160)), max_new=100)
    driver.step()
    late = driver.add(tail(1, 3), max_new=100)
    driver.step()
    assert driver.scheduler.admission.first_without_room is not None
    while not long.sequences[0].output_token_ids:
        driver.step()
    driver.step()
    assert driver.admitted == [stream, long, late]
    assert len(driver.scheduler.running) == 3


def test_what_does_not_fit_takes_nothing_and_counts_as_no_use() -> None:
    """It is tried again and again, but only what is admitted opens a table."""
    driver = SchedulerDriver(num_blocks=60, budget=64, max_num_seqs=16)
    stem = list(range(42))
    for number in range(40):
        driver.add(stem + tail(number, 20), max_new=30)
    driver.run()
    stats = driver.cache.stats
    admissions = 40 + driver.scheduler.num_preemptions
    assert stats.opened_tables == admissions
    assert stats.copied_blocks <= admissions


@pytest.mark.parametrize("ahead", [False, True])
def test_no_request_starves_under_random_overload(ahead: bool) -> None:
    """A long run under steady overload: what arrived before its end is finished soon after it."""
    rng = random.Random(1)
    driver = SchedulerDriver(num_blocks=120, max_num_seqs=6, budget=48, max_overtaken=10, ahead=ahead)
    for number in range(300):
        stem = rng.choice(STEMS)[: rng.choice([0, 0, 20, 40])]
        driver.add(stem + tail(number, rng.randint(1, 20)), max_new=rng.randint(1, 20))
        driver.step()
    positions = {request.arrival: position for position, request in enumerate(driver.admitted)}
    # A request admitted at position p was overtaken by at most ten, so at most ten of the first p arrived later.
    assert all(position - arrival <= 10 for arrival, position in positions.items())
    driver.run()
    assert len(driver.admitted) == 300


def test_a_prompt_that_is_preempted_and_admitted_again_in_one_step_gets_one_chunk() -> None:
    """It used to be scheduled twice, for which the step failed with all its requests."""
    driver = SchedulerDriver(budget=16)
    for tenant in ("a", "b"):
        driver.add(tail(len(driver.requests), 48), tenant=tenant)
        driver.step()
    scheduler = driver.scheduler
    first, second = scheduler.running
    assert first.num_pending > 1 < second.num_pending
    prompts = [first, second]
    scheduler._preempt(second)  # as for a decoding group that needs its blocks
    # So that its prompt comes after the other's, which lets it in before itself.
    scheduler.shares.charge_cost("b", 1000)
    chunks = scheduler._schedule_prompts(prompts, 128)
    assert {chunk.group for chunk in chunks} == {first, second}
    assert len(chunks) == 2


def test_what_an_aborted_prompt_did_not_compute_is_not_charged() -> None:
    """A tenant whose client left at the beginning of a long prompt came last until the others had had as much."""
    driver = SchedulerDriver(budget=16)
    driver.add(tail(0, 8), tenant="b", max_new=30)
    long = driver.add(tail(1, 45), tenant="a")
    driver.step()
    (group,) = driver.scheduler.groups_of(long)
    computed = group.sequences[0].num_computed
    assert 0 < computed < 16
    driver.abort(long)
    assert driver.scheduler.shares.counter("a") <= COMPUTED_TOKEN_COST * (computed + 1)


def test_what_a_group_lost_is_the_most_that_it_had_computed() -> None:
    """A group that was preempted twice must make up for what it lost the first time, too, before it is again."""
    driver = SchedulerDriver(budget=16)
    (group,) = driver.scheduler.groups_of(driver.add(range(40)))
    for num_steps in (2, 1):
        driver.cache.clear()
        driver.steps(num_steps)
        driver.scheduler._preempt(group)
        assert group.num_computed_before == 32


def test_nothing_is_kept_of_what_is_aborted_while_it_waits() -> None:
    """One for a prefix that another computes, and one for blocks."""
    driver = SchedulerDriver(num_blocks=40, budget=32)
    driver.add(tail(0, 60), max_new=40)
    driver.step()
    waiting = [driver.add(prompt) for prompt in ([*tail(0, 60), 1], tail(1, 140))]
    driver.step()
    groups = [weakref.ref(group) for request in waiting for group in driver.scheduler.groups_of(request)]
    assert driver.scheduler.admission.first_without_room is groups[1]()
    for request in waiting:
        driver.abort(request)
    driver.run()
    assert [group() for group in groups] == [None, None]
