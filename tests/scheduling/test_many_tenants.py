"""However many tenants wait, they are served in the same order, and a step does not look at all of them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import pytest
from support.scheduler_driver import STEMS, SchedulerDriver, prompt, tail

from radixkv.scheduling.fair_shares import FairShares, WaitsFor
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.tenant_usage import TenantUsage
from radixkv.scheduling.waiting_queue import WaitingQueue


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often a tenant's weight or counter was looked at."""
    counts: Counter[str] = Counter()
    share, counter = FairShares.share, FairShares.counter

    def counted_share(self: FairShares, tenant: str) -> TenantShare:
        counts["share"] += 1
        return share(self, tenant)

    def counted_counter(self: FairShares, tenant: str) -> float:
        counts["counter"] += 1
        return counter(self, tenant)

    monkeypatch.setattr(FairShares, "share", counted_share)
    monkeypatch.setattr(FairShares, "counter", counted_counter)
    return counts


def with_tenants(count: int, max_num_seqs: int, n: int = 1) -> SchedulerDriver:
    """One short request of each."""
    driver = SchedulerDriver(max_num_seqs=max_num_seqs, budget=2048, num_blocks=8000)
    for number in range(count):
        driver.add(prompt(6), n=n, max_new=20, tenant=f"tenant {number}")
    return driver


def test_what_serves_a_tenant_takes_as_long_however_many_wait(calls: Counter[str]) -> None:
    """Two thousand tenants took half a minute: each admission sorted them all, and each one's share summed all weights."""
    work = []
    for count in (40, 80):
        calls.clear()
        driver = with_tenants(count, max_num_seqs=count)
        driver.step()
        assert len(driver.admitted) == count
        work.append(calls.total())
    assert work[1] < 2.5 * work[0]


def test_a_step_looks_only_once_at_all_tenants_whose_requests_exceed_their_shares(calls: Counter[str]) -> None:
    """With several samples per request, each admission used to look at all that wait for one that is below its share."""
    work = []
    for max_num_seqs in (8, 32):
        driver = with_tenants(100, max_num_seqs, n=2)
        calls.clear()
        driver.step()
        assert len(driver.admitted) == max_num_seqs // 2
        work.append(calls.total())
    assert work[1] < 2 * work[0]


def test_a_step_looks_once_at_each_tenant_whose_request_exceeds_its_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was looked at for whom to preempt, and again for whom to admit, although nothing had changed in between."""
    num_looks: Counter[str] = Counter()
    has_claim = TenantUsage.has_claim

    def counted(self: TenantUsage, group: SequenceGroup) -> bool:
        num_looks[group.request.tenant] += 1
        return has_claim(self, group)

    monkeypatch.setattr(TenantUsage, "has_claim", counted)
    driver = with_tenants(100, max_num_seqs=8, n=2)
    driver.step()
    assert len(driver.admitted) == 4
    assert set(num_looks.values()) == {1}


def test_a_step_that_admits_nothing_takes_as_long_however_many_wait(calls: Counter[str]) -> None:
    work = []
    for count in (40, 80):
        driver = with_tenants(count, max_num_seqs=4)
        driver.step()
        calls.clear()
        driver.step()
        assert len(driver.admitted) == 4
        work.append(calls.total())
    assert work[0] == work[1]


def test_with_slots_free_and_nobody_above_its_share_only_those_are_looked_at_that_start(calls: Counter[str]) -> None:
    """For whom to preempt others, all were looked at that the free slots suffice for: 5 ms for 79 of them."""
    work = []
    for count in (40, 80):
        driver = SchedulerDriver(max_num_seqs=100, budget=64)
        for number in range(count):
            driver.add(prompt(40), tenant=f"tenant {number}")
        driver.step()
        calls.clear()
        driver.step()
        assert len(driver.admitted) < 5
        work.append(calls.total())
    assert work[0] == work[1]


def test_a_step_that_computes_prompts_of_two_takes_as_long_however_many_wait(calls: Counter[str]) -> None:
    """Which of them want more than their shares was found out for all that wait: 3 ms for 3,000."""
    work = []
    for count in (40, 80):
        driver = SchedulerDriver(max_num_seqs=2, budget=64)
        for number in range(count):
            driver.add(prompt(40), tenant=f"tenant {number}")
        calls.clear()
        assert len({chunk.group.request.tenant for chunk in driver.step()}) == 2
        work.append(calls.total())
    assert work[0] == work[1]


@pytest.mark.parametrize("options", [{}, {"read_cache": False}, {"n": 16}])
def test_a_step_into_which_nothing_fits_takes_as_long_however_many_wait(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each tenant's first group was tried, and looked at all running groups: whether they had changed, or had its prefix."""
    num_looks = num_tried = 0
    num_pending = cast(property, SequenceGroup.num_pending)

    def counted(group: SequenceGroup) -> int:
        nonlocal num_looks
        num_looks += 1
        return cast(int, num_pending.fget(group))  # type: ignore[misc]

    def tried(*arguments: Any, **options: Any) -> list[SequenceGroup]:
        nonlocal num_tried
        num_tried += 1
        return candidates(*arguments, **options)

    candidates, work = WaitingQueue.candidates, []
    for count in (80, 160):
        driver = SchedulerDriver(max_num_seqs=16, budget=2048, num_blocks=120)
        for number in range(count):
            driver.add(prompt(40), max_new=20, tenant=f"tenant {number}", **(options if number > 7 else {}))
        driver.steps(3)
        num_looks, num_tried, num_running = 0, 0, len(driver.scheduler.running)
        with monkeypatch.context() as patch:
            patch.setattr(SequenceGroup, "num_pending", property(counted))
            patch.setattr(WaitingQueue, "candidates", tried)
            driver.step()
        assert len(driver.scheduler.running) == num_running < 16
        assert driver.scheduler.admission.first_without_room is not None
        work.append((num_looks, num_tried))
    assert work[0] == work[1]


def test_choosing_whom_to_preempt_takes_as_long_per_group_however_many_tenants_run(calls: Counter[str]) -> None:
    work = []
    for count in (40, 80):
        driver = with_tenants(count, max_num_seqs=count)
        driver.step()
        calls.clear()
        order = driver.scheduler.shares.preempted_last_first(driver.scheduler.running, lambda group: group.num_blocks)
        assert len(order) == count
        work.append(calls.total())
    assert work[1] < 2.5 * work[0]


@pytest.mark.parametrize("seed", range(5))
def test_of_the_tenants_with_most_the_last_group_is_preempted_first(seed: int) -> None:
    rng = random.Random(seed)
    driver = SchedulerDriver(max_num_seqs=40, budget=2048, shares={"a": TenantShare(2.5), "b": TenantShare(0.5)})
    for _ in range(40):
        driver.add(prompt(rng.randint(2, 9)), tenant=rng.choice("abcdef"), priority=rng.randint(-1, 1), max_new=20)
    driver.step()
    left = list(driver.scheduler.running)
    assert len(left) == 40
    shares = driver.scheduler.shares
    for victim in reversed(shares.preempted_last_first(left, lambda group: group.num_blocks)):
        has: Counter[str] = Counter()
        for group in left:
            has[group.request.tenant] += group.num_blocks
        last = {group.request.tenant: group for group in left}
        tenant = max(last, key=lambda each: (has[each] / shares.share(each).weight, last[each].rank))
        assert victim is last[tenant]
        left.remove(victim)


def sorted_anew(self: TenantUsage) -> list[str]:
    """All waiting tenants in turn."""
    waiting, shares = self._waiting.num_seqs, self._shares
    return sorted(waiting, key=lambda each: (shares.counter(each), waiting[each], shares._charged_at.get(each, -1)))


def all_claimants(self: TenantUsage, *waiting_for: WaitsFor) -> Iterator[str]:
    """What `TenantUsage.claimants` promises, at the cost of all tenants for each that is served."""
    return (each for each in sorted_anew(self) if self.has_claim(self._waiting.first(each)))


def all_in_turn(self: TenantUsage) -> Iterator[str]:
    """What `TenantUsage.in_turn` promises, likewise."""
    return iter(sorted(sorted_anew(self), key=lambda each: not self.has_claim(self._waiting.first(each))))


def decisions(seed: int) -> list[tuple[int, int, int]]:
    """What the scheduler decides about made-up requests: arrival, sample and tokens of each chunk."""
    rng = random.Random(seed)
    tenants = [f"tenant {number}" for number in range(rng.choice([2, 6, 20]))]
    shares = {
        tenant: TenantShare(rng.choice([0.5, 1, 4]), rng.choice([None, 3])) for tenant in tenants if rng.random() < 0.4
    }
    driver = SchedulerDriver(
        num_blocks=rng.choice([200, 2000]),
        budget=rng.choice([8, 32, 128]),
        max_num_seqs=rng.choice([4, 16]),
        max_overtaken=rng.choice([1, 32]),
        shares=shares,
    )
    chunks = []
    for _ in range(60):
        for _ in range(rng.choice([0, 0, 1, 6])):
            stem = STEMS[rng.randrange(3)][: rng.choice([0, 40])]
            driver.add(
                stem + tail(len(driver.requests), rng.randint(1, rng.choice([1, 40]))),
                n=rng.randint(1, 3),
                tenant=rng.choice(tenants),
                priority=rng.randint(-1, 1),
                max_new=rng.randint(1, 20),
            )
        if driver.has_work:
            chunks += driver.step()
    return [(chunk.group.request.arrival, chunk.sequence.index, chunk.num_tokens) for chunk in chunks]


@pytest.mark.parametrize("seed", range(12))
def test_the_order_is_that_of_all_tenants_sorted_anew_for_each_admission(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = decisions(seed)
    monkeypatch.setattr(TenantUsage, "claimants", all_claimants)
    monkeypatch.setattr(TenantUsage, "in_turn", all_in_turn)
    assert decisions(seed) == made
