"""Claims to a share as groups are added and removed within one step: which hold, and which are voided by whom."""

from __future__ import annotations

import pytest
from support.scheduler_driver import SchedulerDriver, prompt

from radixkv.scheduling.fair_shares import WaitsFor
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.tenant_usage import TenantUsage

BUDGET = 16


def make_driver(max_num_seqs: int = 4, **counters: float) -> SchedulerDriver:
    """Tenant "v" runs two streams and a prompt in progress, in this order; three requests of each other tenant wait."""
    driver = SchedulerDriver(max_num_seqs=max_num_seqs, budget=BUDGET)
    driver.add_several(2, 3, max_new=200, tenant="v")
    driver.step()
    driver.add(prompt(100), max_new=4, tenant="v")
    driver.step()
    for tenant, counter in counters.items():
        driver.add_several(3, 5, max_new=1, tenant=tenant)
        set_counter(driver, tenant, counter)
    return driver


def set_counter(driver: SchedulerDriver, tenant: str, counter: float) -> None:
    shares = driver.scheduler.shares
    shares.charge_cost(tenant, counter - shares.counter(tenant))


def usage_of(driver: SchedulerDriver) -> TenantUsage:
    scheduler = driver.scheduler
    return TenantUsage(
        scheduler.shares, scheduler.running, scheduler.waiting, driver.cache, driver.max_num_seqs, burst=BUDGET
    )


def first_group(driver: SchedulerDriver, tenant: str) -> SequenceGroup:
    return driver.scheduler.waiting.first(tenant)


def refund(driver: SchedulerDriver) -> float:
    """What tenant "v" gets back if its prompt in progress is preempted."""
    *_, group = driver.scheduler.running
    return driver.scheduler.shares.unused(group)


def test_no_victim_is_one_whose_refund_would_void_the_claim_of_a_group_added_before() -> None:
    """Its tenant would come before the first group's, but not before the second one's: so a stream is preempted."""
    driver = make_driver(a=101, b=100)
    *_, stream, in_progress = driver.scheduler.running
    set_counter(driver, "v", 100 - BUDGET + refund(driver))
    a, b = (first_group(driver, tenant) for tenant in "ab")
    assert usage_of(driver).victims_for_seqs(b, 1) == [in_progress]
    usage = usage_of(driver)
    assert usage.has_claim(a)
    usage.add(a)
    assert usage.has_claim(b)
    assert usage.victims_for_seqs(b, 1) == [stream]


def test_a_later_group_does_not_lower_what_an_earlier_one_claims() -> None:
    driver = make_driver(a=101, b=100, c=90)
    *_, stream, _ = driver.scheduler.running
    set_counter(driver, "v", 100 - BUDGET + refund(driver))
    usage = usage_of(driver)
    for tenant in "ab":
        usage.add(first_group(driver, tenant))
    assert usage.victims_for_seqs(first_group(driver, "c"), 1) == [stream]


@pytest.mark.parametrize(("ahead", "claims"), [(BUDGET / 2, True), (BUDGET / 2 + 1, False)])
def test_a_claim_lasts_as_long_as_its_tenant_is_not_ahead_of_the_last_by_more_than_a_step(
    ahead: float, claims: bool
) -> None:
    driver = make_driver(a=100 + ahead, b=100)
    driver.scheduler.set_tenants({"a": TenantShare(weight=2)})
    assert usage_of(driver).has_claim(first_group(driver, "a")) == claims


@pytest.mark.parametrize(("uncharged", "claims"), [(BUDGET, True), (BUDGET + 1, False)])
def test_what_an_added_group_will_be_charged_counts_against_its_tenant_s_next_claim(
    uncharged: float, claims: bool
) -> None:
    driver = make_driver(max_num_seqs=12, a=100, b=100)
    usage = usage_of(driver)
    first, second, _ = driver.scheduler.waiting.groups("a")
    usage.add(first, uncharged)
    assert usage.has_claim(second) == claims


@pytest.mark.parametrize(("ahead", "claims"), [(BUDGET, True), (BUDGET + 1, False)])
def test_the_claims_of_others_are_measured_by_who_gave_way(ahead: float, claims: bool) -> None:
    driver = make_driver(a=100)
    *_, in_progress = driver.scheduler.running
    set_counter(driver, "v", 100 - ahead + refund(driver))
    usage = usage_of(driver)
    usage.remove([in_progress])
    assert usage.has_claim(first_group(driver, "a")) == claims


def test_who_gave_way_and_has_less_than_its_share_left_has_a_claim() -> None:
    """Several samples that are preempted may take their tenant from above its share to below it."""
    driver = SchedulerDriver(max_num_seqs=4, budget=BUDGET)
    for n in (3, 2):
        driver.add(prompt(30), n=n, tenant="v")
    driver.step()
    (in_progress,) = driver.scheduler.running
    driver.add_several(3, 5, tenant="a")
    set_counter(driver, "a", driver.scheduler.shares.counter("v") + 1)
    usage = usage_of(driver)
    assert list(usage.claimants(WaitsFor.TURN)) == ["a"]
    usage.remove([in_progress])
    assert list(usage.claimants(WaitsFor.TURN)) == ["v", "a"]


@pytest.mark.parametrize(("lacking", "is_preempted"), [(0, True), (1, False)])
def test_the_refunds_of_all_victims_count_together(lacking: float, is_preempted: bool) -> None:
    """The refunds for two prompts in progress bring their tenant as near to the claims of others as it may come."""
    driver = SchedulerDriver(max_num_seqs=4, budget=64)
    for length, tenant in ((3, "v"), (40, "v"), (40, "v"), (4, "w")):
        driver.add(prompt(length), max_new=4, tenant=tenant)
    driver.step()
    stream, first, second, _ = driver.scheduler.running
    driver.add_several(3, 5, max_new=1, tenant="a")
    set_counter(driver, "a", 100)
    unused = driver.scheduler.shares.unused
    set_counter(driver, "v", 100 - BUDGET + unused(first) + unused(second) - lacking)
    victims = usage_of(driver).victims_for_seqs(first_group(driver, "a"), 2)
    assert victims == [second, first if is_preempted else stream]


def test_the_first_victim_for_sequences_is_of_the_tenant_with_most_of_them() -> None:
    """Five samples, whose prompt is in progress, are one group; the other tenant has four, which came later."""
    driver = SchedulerDriver(max_num_seqs=9, budget=BUDGET)
    driver.add(prompt(60), n=5, tenant="few")
    driver.step()
    (first,) = driver.scheduler.running
    driver.add_several(4, 1, max_new=40, tenant="many")
    driver.steps(2)
    driver.add_several(3, 4, tenant="waits")
    set_counter(driver, "waits", 0)
    assert usage_of(driver).victims_for_seqs(first_group(driver, "waits"), 1) == [first]


def test_the_first_victim_for_blocks_is_of_the_tenant_with_most_of_them() -> None:
    driver = SchedulerDriver(num_blocks=64, budget=128)
    driver.add(prompt(120), max_new=40, tenant="few")
    driver.step()
    (first,) = driver.scheduler.running
    driver.add_several(4, 22, max_new=10, tenant="many")
    driver.steps(2)
    driver.add(prompt(4), tenant="waits")
    set_counter(driver, "waits", 0)
    assert usage_of(driver).victims_for_blocks(first_group(driver, "waits")) == [first]


def test_equal_shares_are_not_one_less_because_weights_are_rounded() -> None:
    """In floats, 6 divided by three times 0.1, times 0.1, is less than 2."""
    shares = dict.fromkeys("abc", TenantShare(weight=0.1))
    driver = SchedulerDriver(max_num_seqs=6, budget=BUDGET, shares=shares)
    for tenant in shares:
        driver.add_several(3, 5, tenant=tenant)
    usage = usage_of(driver)
    for tenant in shares:
        first, second, third = driver.scheduler.waiting.groups(tenant)
        usage.add(first)
        assert usage.has_claim(second)
        usage.add(second)
        assert not usage.has_claim(third)
    assert driver.scheduler.shares.apportion("a", 9, driver.scheduler.shares.total_weight(shares)) == 3
