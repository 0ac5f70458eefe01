"""For whom running groups of another tenant are preempted, and what that costs them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scheduler_driver import SchedulerDriver, prompt, steps_to_first_token

from radixkv.scheduling.fair_shares import COMPUTED_TOKEN_COST, GENERATED_TOKEN_COST
from radixkv.scheduling.request import Request
from radixkv.scheduling.tenant_share import TenantShare


def _most_steps(requests: Sequence[Request], budget: int) -> int:
    """Steps to answer them one after the other, each three times over, with one step each time to make room."""
    return sum(3 * (-(-request.num_prompt_tokens // budget) + request.max_new_tokens + 1) for request in requests)


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.fixed_dictionaries({"max_num_seqs": st.integers(1, 6), "budget": st.sampled_from([4, 8, 16, 64])}),
    ahead=st.booleans(),
    lengths=st.tuples(*[st.sampled_from([4, 40, 150])] * 3),
    max_new=st.tuples(*[st.sampled_from([1, 8, 40])] * 3),
    rates=st.tuples(*[st.sampled_from([0.02, 0.1, 0.5])] * 3),
    weights=st.tuples(*[st.sampled_from([0.5, 1, 3])] * 3),
    seed=st.integers(0, 1000),
)
def test_every_request_ends_in_time_and_is_preempted_only_for_requests_that_are_served(
    sizes: dict[str, int],
    ahead: bool,
    lengths: tuple[int, ...],
    max_new: tuple[int, ...],
    rates: tuple[float, ...],
    weights: tuple[float, ...],
    seed: int,
) -> None:
    """Half of the requests lose what they computed when they are preempted; the driver sees whom each is preempted for."""
    rng = random.Random(seed)
    shares = {tenant: TenantShare(weight) for tenant, weight in zip("abc", weights, strict=True)}
    driver = SchedulerDriver(num_blocks=50_000, ahead=ahead, shares=shares, **sizes)
    for _ in range(150):
        for tenant, longest, most, rate in zip("abc", lengths, max_new, rates, strict=True):
            if rng.random() < rate and sum(group.request.tenant == tenant for group in driver.scheduler.waiting) < 5:
                kind = {"read_cache": rng.random() < 0.5, "prompt_logprobs": rng.choice([None, None, 0])}
                driver.add(prompt(rng.randint(1, longest)), max_new=rng.randint(1, most), tenant=tenant, **kind)
        driver.step()
    driver.run(_most_steps(driver.requests, driver.budget))
    for request in driver.requests:
        again = driver.recomputed[request]
        assert again <= 2 * (request.num_prompt_tokens + request.max_new_tokens), "computed again too often"


def test_a_request_that_cannot_resume_from_the_cache_ends_under_another_tenant_s_load() -> None:
    """One token computed since its start used to make it preemptible again, and each time all was computed again."""
    driver = SchedulerDriver(max_num_seqs=2, budget=16)
    driver.add(prompt(3), max_new=400, tenant="b")
    driver.step()
    second = driver.add(prompt(60), max_new=8, tenant="b", read_cache=False)
    for step in range(30):
        if step % 3 == 0:
            driver.add(prompt(5), max_new=1, tenant="a")
        driver.step()
    assert second in driver.preempted
    assert len(second.sequences[0].output_token_ids) == 8


@pytest.mark.parametrize("max_new", [1, 40])
def test_nothing_is_preempted_for_a_tenant_that_would_not_be_next_afterwards(max_new: int) -> None:
    """Its tenant had a claim only until the preempted group waited, too: so one was preempted in vain in every step."""
    driver = SchedulerDriver(max_num_seqs=2, budget=16)
    driver.add(prompt(3), max_new=300, tenant="b")
    driver.step()
    for _ in range(5):
        steps_to_first_token(driver, driver.add(prompt(360), max_new=1, tenant="a"))
    second = driver.add(prompt(60), max_new=max_new, tenant="b")
    driver.step()
    driver.add(prompt(5), max_new=1, tenant="a")
    driver.steps(3 + max_new)
    assert len(second.sequences[0].output_token_ids) == max_new
    assert driver.scheduler.num_preemptions == 0


def test_a_prompt_is_not_preempted_if_its_refund_would_put_its_tenant_first_again() -> None:
    """It is charged in full when it starts: the refund would put its tenant ahead of the one for which it was preempted."""
    driver = SchedulerDriver(max_num_seqs=2, budget=16)
    for length in (3, 400):
        driver.add(prompt(length), max_new=100, tenant="b")
    driver.step()
    driver.add(prompt(5), max_new=1, tenant="a")
    driver.run()


def test_the_request_for_which_others_were_preempted_starts_although_a_limit_holds_another_back() -> None:
    """Room used to be made in the queue's order but used in that of what is cached: in every step, for nobody."""
    driver = SchedulerDriver(max_num_seqs=6, budget=64, shares={"a": TenantShare(max_num_seqs=2)})
    warm = prompt(40)
    driver.add(warm, max_new=1, tenant="a")
    driver.run()
    driver.add(prompt(4), max_new=200, tenant="a")
    driver.add_several(5, 4, max_new=200, tenant="b")
    driver.steps(30)
    cold = driver.add(prompt(40), max_new=4, tenant="a")
    driver.add([*warm, *prompt(2)], max_new=4, n=2, tenant="a")
    assert steps_to_first_token(driver, cold) <= 2
    assert driver.scheduler.num_preemptions == 1


@pytest.mark.parametrize(("n", "num_preemptions"), [(2, 0), (3, 1)])
def test_no_more_are_preempted_than_slots_are_lacking(n: int, num_preemptions: int) -> None:
    driver = SchedulerDriver(max_num_seqs=8, budget=64)
    driver.add_several(6, 8, max_new=200, tenant="a")
    driver.steps(20)
    driver.add(prompt(8), n=n, max_new=4, tenant="b")
    driver.step()
    assert driver.scheduler.num_preemptions == num_preemptions
    driver.run()


def test_one_is_preempted_for_several_that_wait_for_a_common_prefix() -> None:
    """Four used to be preempted for one that started; three of them resumed in that step, and their work was lost."""
    driver = SchedulerDriver(max_num_seqs=8, budget=512)
    driver.add_several(8, 16, max_new=200, tenant="a", read_cache=False)
    driver.steps(20)
    common = prompt(100)
    for _ in range(4):
        driver.add([*common, *prompt(4)], max_new=4, tenant="b")
    driver.step()
    assert driver.scheduler.num_preemptions == 1


@pytest.mark.parametrize(("max_num_seqs", "length"), [(4, 120), (8, 110)])
def test_a_preempted_request_does_not_take_the_blocks_that_are_still_lacking(max_num_seqs: int, length: int) -> None:
    """What was preempted used to resume in its own place: one was preempted in every step, and the other waited for forty."""
    driver = SchedulerDriver(num_blocks=64, block_size=4, budget=64, max_num_seqs=max_num_seqs)
    driver.add_several(4, 40, max_new=60, tenant="a")
    driver.steps(5)
    assert steps_to_first_token(driver, driver.add(prompt(length), max_new=4, tenant="b")) <= 5
    assert driver.scheduler.num_preemptions <= 3


@pytest.mark.parametrize(("length", "preempted"), [(127, True), (128, False)])
def test_blocks_are_preempted_only_up_to_the_other_tenant_s_share(length: int, preempted: bool) -> None:
    """Half of 64 blocks, of four tokens: enough for a prompt of 127 tokens, and for the token that follows it."""
    driver = SchedulerDriver(num_blocks=64, budget=64)
    driver.add_several(4, 40, max_new=60, tenant="a")
    driver.steps(5)
    driver.add(prompt(length), max_new=1, tenant="b")
    driver.steps(5)
    assert (driver.scheduler.num_preemptions > 0) == preempted
    driver.run()


def test_nothing_is_preempted_for_a_second_prompt_while_the_first_is_computed() -> None:
    """The next one did not fit into the step beside it, so what had given way resumed in its place, in every step."""
    driver = SchedulerDriver(max_num_seqs=4, budget=16)
    driver.add_several(3, 4, max_new=100, tenant="b")
    driver.step()
    for length in (200, 60):
        driver.add(prompt(length), max_new=4, tenant="a")
    driver.run()


def test_a_preempted_request_has_no_token_in_flight() -> None:
    """A step's reservations used to leave another tenant's request without blocks, and room was made in that same step."""
    shares = {"b": TenantShare(weight=2.5), "c": TenantShare(weight=0.5, max_num_seqs=6)}
    driver = SchedulerDriver(
        num_blocks=47, max_num_seqs=6, window=3, budget=18, max_overtaken=3, ahead=True, shares=shares
    )
    # Found by the state machine: what is added, how often, and how many steps follow.
    for copies, stem, shared, own, max_new, priority, tenant, steps in (
        (2, 1, 32, 10, 10, 0, "", 12),
        (1, 0, 11, 1, 3, 0, "", 11),
        (3, 2, 14, 13, 28, 1, "", 0),
        (3, 2, 40, 8, 5, 0, "", 8),
        (1, 0, 0, 7, 4, 0, "b", 2),
        (4, 0, 16, 15, 13, 0, "b", 0),
        (4, 2, 32, 6, 19, 0, "b", 8),
        (2, 0, 32, 2, 27, 0, "c", 0),
        (4, 2, 32, 6, 19, 0, "c", 5),
        (1, 2, 1, 1, 29, 0, "", 1),
    ):
        for _ in range(copies):
            number = len(driver.requests)
            tokens = [100 * stem + token for token in range(shared)] + [10_000 + 50 * number + t for t in range(own)]
            ends_after = 9 if max_new == 29 else None
            driver.add(tokens, max_new=max_new, priority=priority, tenant=tenant, ends_after=ends_after)
        for _ in range(steps):
            if driver.has_work:
                driver.step()
    driver.run()
    driver.cache.check()


def test_a_request_with_a_token_in_flight_is_preempted_a_step_later() -> None:
    """With a pin released, there is room for a waiting request until the step's own reservations have taken it."""
    driver = SchedulerDriver(num_blocks=24, ahead=True)
    pinned = prompt(16)
    driver.add(pinned, max_new=1)
    driver.run()
    pin = driver.cache.pin(pinned)
    driver.add_several(3, 8, tenant="a", max_new=200)
    driver.steps(4)
    waits = driver.add(prompt(28), tenant="b")
    driver.steps(5)
    driver.cache.release(pin)
    driver.step()
    assert not driver.preempted
    while waits not in driver.admitted:
        driver.step()
    assert [request.tenant for request in driver.preempted] == ["a"]


def test_nobody_waits_for_the_prefix_of_a_prompt_that_is_preempted_in_the_same_step() -> None:
    driver = SchedulerDriver(max_num_seqs=4, budget=64)
    driver.add_several(3, 4, max_new=200, tenant="b")
    driver.step()
    long = prompt(100)
    in_progress = driver.add(long, max_new=4, tenant="b")
    driver.step()
    waiting = [driver.add(tokens, max_new=4, tenant="a") for tokens in (prompt(5), [*long, 7])]
    shares = driver.scheduler.shares
    shares.charge_cost("b", 1000)
    before, num_lacking = shares.counter("b"), in_progress.sequences[0].num_pending - 1
    assert num_lacking > 0
    driver.step()
    assert in_progress in driver.preempted
    # What was not computed is refunded; two others got tokens.
    assert shares.counter("b") - before == 2 * GENERATED_TOKEN_COST - num_lacking * COMPUTED_TOKEN_COST
    assert driver.scheduler.num_preemptions == 2
    assert driver.admitted[-2:] == waiting
    driver.run()


def test_a_preempted_request_no_longer_counts_towards_its_tenant_s_limit() -> None:
    """A more urgent request of a tenant that has reached its limit starts in the step in which another one is preempted."""
    driver = SchedulerDriver(num_blocks=64, budget=128, shares={"a": TenantShare(max_num_seqs=2)})
    driver.add_several(2, 100, max_new=60, tenant="a")
    driver.steps(3)
    urgent = driver.add(prompt(4), tenant="a", priority=-1)
    lacks_blocks = driver.add(prompt(100), max_new=1, tenant="b")
    driver.step()
    assert len(driver.admitted) == 2
    driver.step()
    assert driver.scheduler.num_preemptions == 1
    assert driver.admitted[2:] == [lacks_blocks, urgent]
    driver.run()


@pytest.mark.parametrize(("cached", "uncached", "num_preemptions"), [(0, 17, 2), (0, 18, 1), (160, 7, 2), (160, 8, 1)])
def test_a_tenant_claims_as_much_as_it_will_not_have_been_charged_for(
    cached: int, uncached: int, num_preemptions: int
) -> None:
    """A prompt's last token is charged as generated, not as computed: it used to count before it was charged."""
    driver = SchedulerDriver(max_num_seqs=6, budget=16)
    stem = prompt(cached or 1)
    driver.add(stem, max_new=1)
    driver.run()
    driver.add_several(6, 3, max_new=200, tenant="a")
    driver.steps(2)
    for tokens in ([*stem[:cached], *prompt(uncached)], prompt(3)):
        driver.add(tokens, max_new=1, tenant="b")
    driver.add(prompt(3), n=4, tenant="c")  # served as little as the other, and without a claim: more than its share
    driver.step()
    assert driver.scheduler.num_preemptions == num_preemptions
    driver.run()


def test_a_tenant_claims_no_more_for_what_was_cached_since_it_was_queued() -> None:
    """With all slots taken, nothing looks prompts up again: it lost the claim to its second request by what is now cached."""
    driver = SchedulerDriver(max_num_seqs=6, budget=16)
    driver.add_several(6, 3, max_new=200, tenant="a")
    driver.steps(2)
    stem = prompt(160)
    for tokens in ([*stem, *prompt(7)], prompt(3)):
        driver.add(tokens, max_new=1, tenant="b")
    driver.add(prompt(3), n=4, tenant="c")  # as in the test before this one
    table = driver.cache.open(stem)
    driver.cache.reserve(table, len(stem))
    driver.cache.append(table, stem)
    driver.cache.close(table)
    driver.step()
    assert driver.scheduler.num_preemptions == 2
    driver.run()


def test_a_request_that_lacks_blocks_holds_others_back_for_one_step_only() -> None:
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=2, budget=128)
    for length in (110, 70):
        driver.add(prompt(length), max_new=60, tenant="a")
    driver.steps(3)
    large = driver.add(prompt(140), max_new=4, tenant="b")  # more blocks than its tenant's share
    driver.step()
    assert driver.scheduler.num_preemptions == 1
    assert len(driver.scheduler.running) == 1
    driver.step()
    assert len(driver.scheduler.running) == 2
    assert large not in driver.admitted
    driver.run()
