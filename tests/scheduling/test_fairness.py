"""Tenants share fairly what is scarce, and others use what one does not need."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.prefix_load_driver import Driver, unlike
from support.scheduler_driver import SchedulerDriver, prompt, steps_to_first_token

from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.fair_shares import PROMPT_LOGPROB_COST, REUSED_TOKEN_COST, FairShares, WaitsFor
from radixkv.scheduling.tenant_share import TenantShare


@settings(max_examples=15, deadline=None)
@given(
    weights=st.tuples(st.sampled_from([0.5, 1, 3]), st.sampled_from([1, 2])),
    lengths=st.tuples(st.integers(1, 30), st.integers(1, 30)),
    max_new=st.tuples(st.integers(1, 20), st.integers(1, 20)),
    max_num_seqs=st.integers(1, 6),
    ahead=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_backlogged_tenants_are_served_by_weight_within_a_bound(
    weights: tuple[float, float],
    lengths: tuple[int, int],
    max_new: tuple[int, int],
    max_num_seqs: int,
    ahead: bool,
    seed: int,
) -> None:
    """In every interval in which both always wait: the VTC paper's bound (theorem 4.4), two batches' work, plus a step's."""
    rng = random.Random(seed)
    shares = {name: TenantShare(weight) for name, weight in zip("ab", weights, strict=True)}
    driver = SchedulerDriver(max_num_seqs=max_num_seqs, num_blocks=4000, ahead=ahead, shares=shares)
    costliest = 0.0
    gaps = []
    for _ in range(100):
        for name, weight, longest, most in zip("ab", weights, lengths, max_new, strict=True):
            while sum(group.request.tenant == name for group in driver.scheduler.waiting) <= max_num_seqs:
                length, new = rng.randint(1, longest), rng.randint(1, most)
                driver.add(prompt(length), max_new=new, tenant=name)
                costliest = max(costliest, (length + 2 * new) / weight)
        driver.step()
        gaps.append(driver.served["a"] / weights[0] - driver.served["b"] / weights[1])
    assert max(gaps) - min(gaps) <= 2 * max_num_seqs * costliest + 2 * driver.budget / min(weights)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(
        st.tuples(
            st.integers(0, 3), st.sampled_from("aaab"), st.integers(1, 40), st.integers(1, 10), st.integers(1, 4)
        ),
        min_size=1,
        max_size=40,
    ),
    max_num_seqs=st.integers(4, 8),
)
def test_nothing_that_fits_waits_and_nobody_starves(
    arrivals: list[tuple[int, str, int, int, int]], max_num_seqs: int
) -> None:
    """Work-conserving: with budget to spare, what waits needs more slots than are free, unless one was passed too often."""
    driver = SchedulerDriver(max_num_seqs=max_num_seqs, max_overtaken=4, num_blocks=4000, budget=16)
    scheduler = driver.scheduler
    schedule = scheduler.schedule

    def schedule_and_verify() -> list[ScheduledChunk]:
        chunks = schedule()
        passable = all(scheduler.waiting.may_be_passed(group) for group in scheduler.waiting)
        prompts = [c for c in chunks if c.sequence.num_pending > 1 or not c.sequence.output_token_ids]
        # Where two tenants compute prompts, one of them may have left the rest to a later step.
        one_tenant = len({chunk.group.request.tenant for chunk in prompts}) < 2
        if sum(chunk.num_tokens for chunk in chunks) < 16 and passable and one_tenant:
            assert all(group.num_seqs > driver.num_free_seqs for group in scheduler.waiting)
        return chunks

    scheduler.schedule = schedule_and_verify  # type: ignore[method-assign]
    for steps, tenant, length, max_new, n in arrivals:
        for _ in range(steps):
            if driver.has_work:
                driver.step()
        driver.add(prompt(length), max_new=max_new, n=n, tenant=tenant)
    driver.run()
    assert all(request.sequences[0].table is None for request in driver.requests)


def test_what_was_queued_under_a_higher_limit_runs_by_itself() -> None:
    driver = SchedulerDriver(max_num_seqs=8, shares={"t": TenantShare(max_num_seqs=4)})
    wide, narrow = (driver.add(prompt(8), n=n, tenant="t") for n in (4, 1))
    driver.scheduler.set_tenants({"t": TenantShare(max_num_seqs=2)})
    driver.run()
    assert driver.admitted == [wide, narrow]


def test_a_tenant_alone_uses_everything_and_gives_back_its_surplus_at_once() -> None:
    driver = SchedulerDriver(max_num_seqs=8, budget=64)
    driver.add_several(12, 8, max_new=200, tenant="greedy")
    driver.steps(20)
    assert len(driver.scheduler.running) == 8
    modest = driver.add_several(6, 8, max_new=50, tenant="modest")
    assert steps_to_first_token(driver, modest[0]) == 1
    driver.steps(3)
    by_tenant = [group.request.tenant for group in driver.scheduler.running]
    assert (by_tenant.count("greedy"), by_tenant.count("modest")) == (4, 4)
    assert len(driver.preempted) == 4
    driver.run()


def test_who_wants_little_leaves_the_rest_to_all_who_want_more() -> None:
    """Two want one slot of eight each, one wants three: more than a quarter, and less than what the two leave over."""
    driver = SchedulerDriver(max_num_seqs=8, budget=64)
    driver.add_several(20, 8, max_new=200, tenant="greedy")
    driver.step()
    driver.step()
    for tenant, count in (("a", 1), ("b", 1), ("c", 3)):
        driver.add_several(count, 8, max_new=40, tenant=tenant)
    driver.steps(3)
    running = Counter(group.request.tenant for group in driver.scheduler.running)
    assert running == {"a": 1, "b": 1, "c": 3, "greedy": 3}
    driver.run()


def test_of_equally_served_tenants_the_one_that_wants_least_goes_first() -> None:
    """All come at once, to a server where nothing is cached; the step has room for one and a half prompts."""
    driver = SchedulerDriver(max_num_seqs=8, budget=64)
    driver.add_several(6, 40, max_new=2, tenant="greedy")
    modest = driver.add(prompt(40), max_new=2, tenant="modest")
    assert steps_to_first_token(driver, modest) == 1
    assert driver.admitted[0] is modest
    driver.run()


@given(
    demands=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 30), min_size=1),
    weights=st.dictionaries(st.sampled_from("abcdef"), st.sampled_from([0.5, 1, 3])),
    amount=st.integers(1, 40),
)
def test_the_level_divides_everything_and_nothing_twice(
    demands: dict[str, int], weights: dict[str, float], amount: int
) -> None:
    shares = FairShares({tenant: TenantShare(weight) for tenant, weight in weights.items()})
    level = shares.level(demands, amount)
    given_away = sum(min(demand, level * weights.get(tenant, 1)) for tenant, demand in demands.items())
    assert given_away == pytest.approx(min(amount, sum(demands.values())))


def test_weights_decide_what_each_gets() -> None:
    shares = {"a": TenantShare(3), "b": TenantShare(1)}
    driver = SchedulerDriver(max_num_seqs=8, shares=shares)
    for tenant in "ab":
        driver.add_several(100, 6, max_new=6, tenant=tenant)
    driver.steps(80)
    assert driver.served["a"] / driver.served["b"] == pytest.approx(3, rel=0.1)


def test_what_was_not_used_cannot_be_claimed_afterwards() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    driver.add(prompt(4), max_new=2, tenant="rare")
    driver.add_several(30, 4, max_new=2, tenant="busy")
    driver.steps(40)
    assert driver.scheduler.waiting
    driver.admitted.clear()
    driver.add_several(8, 4, max_new=2, tenant="rare")
    driver.steps(12)
    tenants = [request.tenant for request in driver.admitted]
    assert tenants.count("rare") - tenants.count("busy") in (0, 1)


def test_what_was_used_before_a_pause_does_not_count_after_it() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    driver.add_several(3, 8, tenant="a")
    driver.run()
    first, second = (driver.add(prompt(8), tenant=tenant) for tenant in "ab")
    driver.run()
    assert driver.admitted[3:] == [first, second]


def test_a_priority_is_one_among_the_tenant_s_own_requests() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    driver.add(prompt(4), max_new=3, tenant="a")
    driver.step()
    for priority in (0, 0, -5):
        driver.add(prompt(4), max_new=3, tenant="b", priority=0)
        driver.add(prompt(4), max_new=3, tenant="a", priority=priority)
    driver.run()
    order = [(request.tenant, request.priority) for request in driver.admitted[1:]]
    assert order == [("b", 0), ("a", -5), ("b", 0), ("a", 0), ("b", 0), ("a", 0)]


def test_reused_tokens_count_little() -> None:
    driver = SchedulerDriver(max_num_seqs=1)
    stem = prompt(400)
    request = driver.add(stem, max_new=1, tenant="a")
    driver.add(prompt(8), max_new=1, tenant="b")
    driver.step()
    before = driver.scheduler.shares.counter("a")
    driver.scheduler.shares.charge_prompt(request, 8, 400)
    assert driver.scheduler.shares.counter("a") - before == 8 + 400 * REUSED_TOKEN_COST
    driver.run()
    # Both want the same number of tokens; one has them in the cache.
    warm, cold = (SchedulerDriver(max_num_seqs=1) for _ in range(2))
    for driver in (warm, cold):
        if driver is warm:
            driver.add(stem, max_new=1)
            driver.run()
            driver.admitted.clear()
        driver.add_several(4, 200, max_new=1, tenant="cold")
        for number in range(4):
            driver.add([*(stem if driver is warm else prompt(400)), number], max_new=1, tenant="hot")
        driver.run()
    assert [request.tenant for request in warm.admitted].index("hot") <= 1
    assert [request.tenant for request in warm.admitted[1:5]] == ["hot"] * 4
    assert [request.tenant for request in cold.admitted[1:5]] != ["hot"] * 4


def test_log_probabilities_of_prompts_are_paid_for() -> None:
    """Each token of a prompt whose log-probabilities are wanted is compared with the whole vocabulary."""
    driver = SchedulerDriver(max_num_seqs=4, budget=64)
    driver.add(prompt(21), tenant="plain", max_new=8)
    driver.add(prompt(21), tenant="with logprobs", max_new=8, prompt_logprobs=0)
    driver.step()
    counter = driver.scheduler.shares.counter
    assert counter("with logprobs") == counter("plain") + 20 * PROMPT_LOGPROB_COST
    (group,) = (group for group in driver.scheduler.running if group.request.tenant == "with logprobs")
    driver.scheduler._preempt(group)  # its prompt is complete
    assert counter("with logprobs") == counter("plain") + 20 * PROMPT_LOGPROB_COST


def test_blocks_are_taken_from_the_tenant_that_has_most() -> None:
    driver = SchedulerDriver(num_blocks=40, max_num_seqs=6)
    greedy = driver.add_several(4, 8, max_new=60, tenant="greedy")
    driver.step()
    modest = driver.add(prompt(8), max_new=60, tenant="modest")
    while not driver.preempted:
        driver.step()
    assert driver.preempted[0] in greedy
    driver.run()
    assert modest not in driver.preempted


def test_blocks_are_taken_from_the_tenant_that_has_most_even_in_one_sequence() -> None:
    driver = SchedulerDriver(num_blocks=40, max_num_seqs=6, budget=128)
    long = driver.add(prompt(100), max_new=60, tenant="greedy")
    driver.add_several(3, 4, max_new=60, tenant="modest")
    while not driver.preempted:
        driver.step()
    assert driver.preempted == [long]
    driver.run()


def test_who_lacks_blocks_gets_its_part_of_them() -> None:
    """The greedy tenant's streams hold nearly all blocks for hundreds of steps; slots are free."""
    driver = SchedulerDriver(num_blocks=64, max_num_seqs=8, budget=64)
    driver.add_several(4, 50, max_new=12, ends_after=12, tenant="greedy")
    driver.steps(4)
    waiting = driver.add_several(8, 50, max_new=12, tenant="greedy")
    modest = driver.add(prompt(60), max_new=4, tenant="modest")
    assert steps_to_first_token(driver, modest) <= 3
    assert any(request.sequences[0].table is None for request in waiting)
    driver.run()


def test_a_look_up_that_hangs_does_not_cost_a_tenant_its_share() -> None:
    """All slots are taken, so no waiting group is looked at: it waited for the look-up until another tenant's group ended."""
    driver = Driver(max_num_seqs=2)
    for number in range(2):
        driver.add(unlike(5000 + 100 * number, 1), max_new=100, tenant="greedy")
    driver.step()
    driver.loader.look_up = lambda look_up: None  # type: ignore[method-assign]
    modest = driver.add(unlike(1000, 2), tenant="modest")
    driver.steps(3)
    assert driver.scheduler.num_preemptions == 0
    driver.give_up()
    assert modest in driver.scheduler.running
    assert driver.scheduler.num_preemptions == 1


def test_a_tenant_s_large_request_holds_up_its_own_and_not_the_others() -> None:
    """One tenant has five streams and a request for four samples; three slots are idle, and stay free for the others."""
    driver = SchedulerDriver(max_num_seqs=8, max_overtaken=3)
    streams = driver.add_several(5, 4, max_new=400, tenant="greedy")
    driver.step()
    large = driver.add(prompt(4), n=4, max_new=2, tenant="greedy")
    own = driver.add_several(10, 4, max_new=1, tenant="greedy")
    for _ in range(30):
        modest = driver.add(prompt(4), max_new=1, tenant="modest")
        assert steps_to_first_token(driver, modest) == 1
    assert large not in driver.admitted
    assert sum(request in driver.admitted for request in own) == 3
    driver.run()
    assert large in driver.admitted
    assert driver.admitted.index(large) > driver.admitted.index(streams[-1])


def test_a_large_request_of_a_tenant_that_runs_nothing_is_waited_for() -> None:
    """Its share would be a quarter of the slots; it needs half of them at once, while others take each that is freed."""
    driver = SchedulerDriver(max_num_seqs=8, max_overtaken=4)
    for number in range(180):  # of different lengths, so that slots are freed one by one
        driver.add(prompt(4), max_new=5 + number % 7, tenant="abc"[number % 3])
    driver.step()
    large = driver.add(prompt(4), n=4, max_new=4, tenant="d")
    assert steps_to_first_token(driver, large) < 40
    driver.run()


@pytest.mark.parametrize(("served", "num_computed"), [(1000, 15), (100, 0)])
def test_a_prompt_in_progress_is_held_up_only_by_tenants_that_were_served_less(served: int, num_computed: int) -> None:
    """None of them has a claim to its share: one that was served least waits for all slots."""
    driver = SchedulerDriver(max_num_seqs=8, budget=16)
    driver.add(prompt(4), max_new=100, tenant="stream")
    driver.step()
    driver.add(prompt(4), n=8, tenant="served least")
    long = driver.add(prompt(200))
    driver.step()
    driver.scheduler.shares.charge_cost("other", served)
    driver.add(prompt(60), tenant="other")
    before = long.sequences[0].num_computed
    driver.step()
    assert long.sequences[0].num_computed - before == num_computed
    driver.run()


def test_a_limit_of_sequences_holds_even_where_nobody_else_needs_them() -> None:
    driver = SchedulerDriver(max_num_seqs=8, shares={"a": TenantShare(max_num_seqs=2)})
    driver.add_several(6, 4, max_new=4, tenant="a")
    for _ in range(3):
        driver.step()
        assert len(driver.scheduler.running) == 2
    driver.run()


def test_a_wide_request_that_would_exceed_the_limit_is_not_passed_by_narrow_ones_of_its_tenant() -> None:
    driver = SchedulerDriver(max_num_seqs=8, shares={"a": TenantShare(max_num_seqs=2)})
    first = driver.add(prompt(4), max_new=8, tenant="a")
    driver.step()
    wide, narrow = (driver.add(prompt(4), n=n, tenant="a") for n in (2, 1))
    driver.run()
    assert driver.admitted == [first, wide, narrow]


def test_a_claim_comes_before_a_prompt_in_progress_whose_tenant_has_one_too() -> None:
    driver = SchedulerDriver(max_num_seqs=8, budget=16)
    for length in (200, 60):
        driver.add(prompt(length), tenant="a")
    driver.step()
    driver.scheduler.shares.charge_cost("b", driver.scheduler.shares.counter("a") + 1)
    other = driver.add(prompt(60), tenant="b")
    driver.step()
    assert other in driver.admitted
    driver.run()


def test_the_order_in_which_groups_are_preempted() -> None:
    driver = SchedulerDriver(max_num_seqs=8)
    for tenant in "aab":
        driver.add(prompt(8), max_new=20, tenant=tenant)
    driver.step()
    running = list(driver.scheduler.running)
    order = FairShares().preempted_last_first(running, lambda group: group.num_blocks)
    assert [running.index(group) for group in order] == [0, 2, 1]
    heavy = FairShares({"a": TenantShare(4)})
    order = heavy.preempted_last_first(running, lambda group: group.num_blocks)
    assert [running.index(group) for group in order] == [0, 1, 2]
    driver.run()


def test_what_a_tenant_has_cached_beyond_its_share_is_evicted_first() -> None:
    driver = SchedulerDriver(num_blocks=100, shares={"bulk": TenantShare(max_cached_share=0.2)})
    stem = prompt(40)
    driver.add(stem, max_new=1, tenant="modest")
    driver.run()
    driver.add_several(30, 40, max_new=1, tenant="bulk")
    driver.run()
    assert driver.cache.match(stem) == 40
    driver.scheduler.set_tenants({})
    driver.add_several(12, 40, max_new=1, tenant="bulk")
    driver.run()
    assert driver.cache.match(stem) == 0


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("weight", [0, -1, float("inf"), float("nan"), True, "1"], "a number above 0"),
        ("max_num_seqs", [0, 1.5, True, "1"], "a whole number of at least 1"),
        ("max_cached_share", [-0.1, 1.5, float("nan"), True, "1"], "a number from 0 to 1"),
    ],
)
def test_an_impossible_share_is_refused(name: str, values: list[Any], expected: str) -> None:
    for value in values:
        with pytest.raises(ValueError, match=f"^{name}: expected {expected}"):
            TenantShare(**{name: value})


@pytest.mark.parametrize("waiting", [{"a": 1, "b": 1, "new": 1}, {"new": 1, "b": 1, "a": 1}])
def test_among_equal_tenants_the_one_served_longest_ago_goes_first(waiting: dict[str, int]) -> None:
    shares = FairShares()
    for tenant, generated in (("b", 1), ("a", 1), ("b", -1), ("a", -1)):
        shares.charge_generated(tenant, generated)
    for tenant, num_seqs in waiting.items():
        shares.set_waiting(tenant, num_seqs)
    assert [turn.tenant for turn in shares.in_turn(WaitsFor.TURN)] == ["new", "b", "a"]
