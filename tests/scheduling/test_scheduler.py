"""What the scheduler promises, without a model; `scheduler_driver` verifies every step."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support.scheduler_driver import SchedulerDriver

from radixkv import SamplingParams
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.fair_shares import COMPUTED_TOKEN_COST
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_share import TenantShare

_STEMS = [[100 * stem + token for token in range(40)] for stem in range(3)]


def tail(number: int, length: int) -> list[int]:
    return [10_000 + 50 * number + token for token in range(length)]


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, run, are aborted and preempted at random, with small caches, narrow windows and tight budgets."""

    @initialize(
        num_blocks=st.integers(24, 60),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        window=st.integers(1, 5),
        max_overtaken=st.integers(0, 3),
        samples=st.sampled_from([1, 1, 3]),
        ahead=st.booleans(),
        tenants=st.sampled_from([1, 1, 3]),
    )
    def start(self, samples: int, ahead: bool, tenants: int, **sizes: int) -> None:
        shares = {"b": TenantShare(weight=2.5), "c": TenantShare(weight=0.5, max_num_seqs=sizes["max_num_seqs"])}
        self.driver = SchedulerDriver(**sizes, ahead=ahead, shares=shares)
        self.tenants = ["", "b", "c"][:tenants]
        self.max_samples = min(samples, sizes["max_num_seqs"])

    @rule(
        stem=st.integers(0, 2),
        shared=st.integers(0, 40),
        own=st.integers(1, 20),
        priority=st.sampled_from([0, 0, 0, -1, 1]),
        max_new=st.integers(1, 30),
        ends_after=st.integers(1, 60),
        n=st.integers(1, 3),
        copies=st.integers(1, 4),
        tenant=st.integers(0, 2),
    )
    def add(self, stem: int, shared: int, own: int, n: int, copies: int, tenant: int, **options: int) -> None:
        n = min(n, self.max_samples)
        for _ in range(copies):
            prompt = _STEMS[stem][:shared] + tail(len(self.driver.requests), own)
            self.driver.add(prompt, n=n, tenant=self.tenants[tenant % len(self.tenants)], **options)

    @rule(count=st.integers(1, 12))
    def step(self, count: int) -> None:
        for _ in range(count):
            if self.driver.has_work:
                self.driver.step()

    @precondition(lambda self: self.driver.requests)
    @rule(which=st.integers(0, 1000))
    def abort(self, which: int) -> None:
        self.driver.abort(self.driver.requests[which % len(self.driver.requests)])

    @invariant()
    def cache_is_sound(self) -> None:
        if hasattr(self, "driver"):
            self.driver.cache.check()
            assert self.driver.num_free_seqs >= 0
            ranks = [group.rank for group in self.driver.scheduler.running]
            assert ranks == sorted(ranks)
            waiting = self.driver.scheduler.waiting
            assert waiting.num_uncached_tokens == sum(map(waiting.num_uncached, waiting))
            assert all(1 <= waiting.num_uncached(group) <= len(group.prompt) for group in waiting)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            cache = self.driver.cache
            assert cache.num_free_blocks + cache.num_evictable_blocks == cache.num_blocks


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def numbers(requests: list[Request]) -> list[int]:
    return [request.arrival for request in requests]


def warm(driver: SchedulerDriver, prompt: list[int]) -> None:
    """Leave a prompt in the cache."""
    driver.add(prompt, max_new=1)
    driver.run()
    driver.requests.clear()
    driver.admitted.clear()


def test_the_most_cached_goes_first_and_equals_in_order_of_arrival() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, _STEMS[0])
    first = 1
    for number, shared in enumerate([0, 8, 0, 32, 8]):
        driver.add(_STEMS[0][:shared] + tail(number, 5))
    driver.run()
    assert [number - first for number in numbers(driver.admitted)] == [3, 1, 4, 0, 2]


def test_of_waiting_prompts_what_is_cached_does_not_count_as_queued() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, _STEMS[0])
    waiting, cache = driver.scheduler.waiting, driver.cache
    before = (cache.stats, cache.version)

    def counted(prompt: list[int], **options: Any) -> int:
        num_tokens = waiting.num_uncached_tokens
        driver.add(prompt, **options)
        return waiting.num_uncached_tokens - num_tokens

    assert counted(_STEMS[0][:32] + tail(0, 5)) == 5
    assert counted(_STEMS[0][:39]) == 1  # for its logits
    assert counted(_STEMS[1]) == 40
    assert counted(_STEMS[0], namespace="another") == 40
    assert counted(_STEMS[0], prompt_logprobs=0) == 40  # cached tokens would have no log-probabilities
    assert (cache.stats, cache.version) == before
    driver.abort(driver.requests[-1])
    assert waiting.num_uncached_tokens == 5 + 1 + 40 + 40
    driver.run()
    assert waiting.num_uncached_tokens == 0


def test_a_prompt_that_reads_nothing_does_not_wait_for_one_that_computes_its_prefix() -> None:
    """It used to wait until the other was computed, and then computed everything itself."""
    driver = SchedulerDriver(budget=24, max_num_seqs=4, num_blocks=200)
    long = [token for stem in range(4) for token in range(1000 * stem, 1000 * stem + 40)]
    driver.add(long)
    for _ in range(6):  # its last 16 tokens leave 8 of a step to others
        driver.step()
    waits = driver.add([*long, 1])
    reads_nothing = driver.add([*long, 2], prompt_logprobs=0)
    driver.step()
    assert reads_nothing in driver.admitted
    assert waits not in driver.admitted
    driver.run()


@pytest.mark.parametrize("max_new", [1, 3])
def test_the_tokens_of_all_samples_are_charged(max_new: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt's last chunk brings a first token for each sample, of which only one used to be charged."""
    driver = SchedulerDriver(max_num_seqs=8)
    charged: list[int] = []
    monkeypatch.setattr(
        driver.scheduler.shares, "charge", lambda tenant, generated=0, **others: charged.append(generated)
    )
    driver.add(tail(0, 8), n=5, max_new=max_new)
    driver.run()
    assert sum(charged) == 5 * max_new


def test_of_a_preempted_answer_what_is_still_cached_does_not_count_as_queued() -> None:
    driver = SchedulerDriver(num_blocks=16, block_size=4, max_num_seqs=2)
    for number in range(2):
        driver.add(tail(number, 24), max_new=30)
    while not driver.preempted:
        driver.step()
    waiting = driver.scheduler.waiting
    (group,) = waiting
    # The other sequence has taken some of its blocks in the same step.
    assert 1 <= waiting.num_uncached_tokens <= len(group.prompt) - driver.cache.match(group.prompt) < 24
    driver.run()
    assert waiting.num_uncached_tokens == 0


def test_preempted_answers_go_on_in_order_of_arrival_whatever_is_cached_of_them() -> None:
    driver = SchedulerDriver()
    warm(driver, _STEMS[0])
    waiting = driver.scheduler.waiting
    for prompt in (tail(0, 30), _STEMS[0][:30]):
        driver.add(prompt)
        (group,) = driver.scheduler.groups_of(driver.requests[-1])
        waiting.remove(group)
        group.started = True
        waiting.add(group)
    assert [group.request for group in waiting.candidates("", look_up=True)] == driver.requests
    assert waiting.num_uncached_tokens == 30 + 1


def test_priorities_come_before_what_is_cached_and_before_age() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    warm(driver, _STEMS[0])
    for number, (priority, shared) in enumerate([(1, 32), (0, 0), (1, 0), (-2, 0), (0, 32)]):
        driver.add(_STEMS[0][:shared] + tail(number, 5), priority=priority)
    driver.run()
    assert [number - 1 for number in numbers(driver.admitted)] == [3, 4, 1, 0, 2]


@pytest.mark.parametrize("ahead", [False, True])
def test_a_cold_prompt_among_hot_ones_is_overtaken_a_bounded_number_of_times(ahead: bool) -> None:
    """Cached prompts come faster than they are answered: the longest match alone would never take the cold one."""
    driver = SchedulerDriver(max_num_seqs=2, max_overtaken=7, ahead=ahead)
    warm(driver, _STEMS[0])
    for number in range(3):
        driver.add(_STEMS[0] + tail(number, 3))
    cold = driver.add(tail(99, 30))
    number = 3
    while cold not in driver.admitted:
        driver.add(_STEMS[0] + tail(number, 3))
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
            driver.add(_STEMS[number % 2] + tail(number, 4), max_new=2)
        driver.run()
        computed[window] = driver.num_computed_tokens
    # One stem of 40 each, and 4 prompt tokens and 1 of 2 generated ones for each of twelve.
    assert computed[32] == 2 * 40 + 12 * 5
    assert computed[1] > 2 * computed[32]


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
    background = driver.add(_STEMS[0], priority=1)
    driver.step()
    urgent = driver.add([*_STEMS[0], 7], priority=0)
    driver.step()
    assert numbers(driver.admitted) == [0, 1]
    while not urgent.sequences[0].output_token_ids:
        assert background.sequences[0].num_computed == 8
        driver.step()
    driver.run()


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
    for _ in range(10):
        driver.step()
    assert first.sequences[0].output_token_ids
    assert second.sequences[0].num_computed == 0
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


def test_when_blocks_run_out_the_least_urgent_gives_way() -> None:
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
    for _ in range(3):
        driver.step()
    assert waits not in driver.admitted
    now[0] = 5.0
    driver.step()
    assert pin.released
    assert waits in driver.admitted
    driver.run()


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
    for _ in range(150):
        driver.step()
    assert calls == before, "as many sequences run as may: none can be admitted"
    while len(driver.admitted) == 2:
        driver.step()
    assert calls["match"] - before["match"] <= 32 + 32


def test_a_prompt_is_looked_up_again_only_when_the_tree_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = SchedulerDriver()
    warm(driver, _STEMS[0])
    queue, cache = driver.scheduler.waiting, driver.cache
    looked_up: list[int] = []
    match = cache.match
    monkeypatch.setattr(cache, "match", lambda tokens, namespace: looked_up.append(1) or match(tokens, namespace))
    for number in range(50):
        driver.add(_STEMS[0] + tail(number, 3))
    assert len(looked_up) == 50
    queue.candidates("", look_up=True)
    assert len(looked_up) == 50
    cache.clear()
    for _ in range(2):
        queue.candidates("", look_up=True)
        assert len(looked_up) == 50 + 32
    # What the first 32 lack now, and what the others lacked when they came.
    assert queue.num_uncached_tokens == 32 * 43 + 18 * 3


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
    assert driver.scheduler.first_without_room is not None
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
        stem = rng.choice(_STEMS)[: rng.choice([0, 0, 20, 40])]
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
    scheduler.shares.charge("b", computed=1000)
    chunks: list[ScheduledChunk] = []
    scheduler._schedule_prompts(chunks, prompts, 128)
    assert {chunk.group for chunk in chunks} == {first, second}
    assert len(chunks) == 2


def test_a_request_that_was_never_queued_is_no_other_one_that_is() -> None:
    """One that ended elsewhere has no time of arrival, and used to be taken for the first that arrived: that was removed."""
    driver = SchedulerDriver()
    waiting = driver.add(tail(0, 8))
    other = Request("other", None, np.array(tail(1, 8), np.int32), SamplingParams(), 0, 4, frozenset())
    assert waiting.arrival == other.arrival
    assert driver.scheduler.groups_of(other) == []
    assert [group.request for group in driver.scheduler.groups_of(waiting)] == [waiting]


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


def test_what_a_group_lost_is_the_most_that_it_had_computed() -> None:
    """A group that gave way twice must make up for what it lost the first time, too, before it gives way again."""
    driver = SchedulerDriver(budget=16)
    (group,) = driver.scheduler.groups_of(driver.add(range(40)))
    for num_steps in (2, 1):
        driver.cache.clear()
        for _ in range(num_steps):
            driver.step()
        driver.scheduler._preempt(group)
        assert group.num_computed_before == 32
