"""Tenants of which nothing can start, as all that could be admitted waits for prefixes: no step looks at them in vain."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from support.prefix_load_driver import SHORT_STEM, SIZE, STEM, Driver, Loader, unlike
from support.scheduler_driver import SchedulerDriver, prompt

from radixkv.scheduling.fair_shares import FairShares, WaitsFor
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.request import SequenceGroup
from radixkv.scheduling.scheduler import Scheduler
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.tenant_usage import TenantUsage
from radixkv.scheduling.tenant_waits import TenantWaits
from radixkv.scheduling.waiting_queue import WaitingQueue
from radixkv.tiers.moves.load import LookUp


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> Counter[WaitsFor]:
    """For what tenants began to wait, and how often."""
    counts: Counter[WaitsFor] = Counter()
    set_waits_for = FairShares.set_waits_for

    def counted(self: FairShares, tenant: str, waits_for: WaitsFor) -> None:
        counts[waits_for] += 1
        set_waits_for(self, tenant, waits_for)

    monkeypatch.setattr(FairShares, "set_waits_for", counted)
    return counts


def waiting_for_one_load(num_tenants: int) -> Driver:
    driver = Driver(max_num_seqs=8)
    driver.add(unlike(5000, 1), max_new=60, tenant="runs")
    for number in range(num_tenants):
        driver.add([*STEM[: 30 * SIZE], *unlike(10_000 + 100 * number, 1)], tenant=f"{number}")
    return driver


def begin_to_compute_a_part(driver: Driver) -> None:
    """A prompt begins which has nothing below the pool, and takes some steps."""
    driver.scheduler._max_num_batched_tokens = 8
    driver.loads.forget(driver.add(STEM[: 20 * SIZE], tenant="computes"))
    driver.step()


def waiting_for_look_ups(num_tenants: int, beside_a_prompt: bool = False) -> Driver:
    driver = waiting_for_one_load(0)
    if beside_a_prompt:
        begin_to_compute_a_part(driver)
    driver.loader.look_up = lambda look_up: None  # type: ignore[method-assign]
    for number in range(num_tenants):
        driver.add([*STEM[: 30 * SIZE], *unlike(10_000 + 100 * number, 1)], tenant=f"{number}")
    return driver


def waiting_for_a_prompt_in_progress(num_tenants: int, max_num_seqs: int = 8) -> SchedulerDriver:
    driver = SchedulerDriver(budget=64, max_num_seqs=max_num_seqs)
    long = prompt(900)
    driver.add(long, tenant="runs")
    driver.step()
    for number in range(num_tenants):
        driver.add([*long, number], tenant=f"{number}")
    return driver


def waiting_for_one_load_beside_a_prompt(num_tenants: int) -> Driver:
    driver = waiting_for_one_load(num_tenants)
    driver.step()
    begin_to_compute_a_part(driver)
    return driver


def waiting_for_look_ups_beside_a_prompt(num_tenants: int) -> Driver:
    return waiting_for_look_ups(num_tenants, beside_a_prompt=True)


def waiting_for_look_ups_before_a_prompt(num_tenants: int) -> Driver:
    driver = waiting_for_look_ups(num_tenants)
    for number in range(num_tenants):
        driver.add([*STEM[: 30 * SIZE], *unlike(20_000 + 100 * number, 1)], tenant=f"{number}")
    driver.step()
    begin_to_compute_a_part(driver)
    return driver


def waiting_for_a_prompt_in_progress_with_no_slot_free(num_tenants: int) -> SchedulerDriver:
    return waiting_for_a_prompt_in_progress(num_tenants, max_num_seqs=1)


def waiting_for_a_prompt_without_tokens(num_tenants: int, lengths_differ: bool = False) -> SchedulerDriver:
    driver = SchedulerDriver(budget=64)
    driver.add(prompt(900), tenant="first")
    stalled = prompt(900)
    driver.add(stalled, tenant="stalled")
    driver.steps(2)
    for number in range(num_tenants):
        num_common = 400 + 4 * number if lengths_differ else len(stalled)
        driver.add([*stalled[:num_common], number], tenant=f"{number}")
    return driver


def waiting_for_parts_of_a_prompt_without_tokens(num_tenants: int) -> SchedulerDriver:
    return waiting_for_a_prompt_without_tokens(num_tenants, lengths_differ=True)


@pytest.mark.parametrize(
    "wait",
    [
        waiting_for_one_load,
        waiting_for_look_ups,
        waiting_for_a_prompt_in_progress,
        waiting_for_one_load_beside_a_prompt,
        waiting_for_look_ups_beside_a_prompt,
        waiting_for_look_ups_before_a_prompt,
        waiting_for_a_prompt_in_progress_with_no_slot_free,
        waiting_for_a_prompt_without_tokens,
        waiting_for_parts_of_a_prompt_without_tokens,
    ],
)
def test_a_step_takes_as_long_however_many_tenants_wait_for_prefixes(
    wait: Callable[[int], Driver | SchedulerDriver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With slots free, all of them were looked at in each step: 5,000 took 65 ms, and behind a prompt in progress 220."""
    num_looks: Counter[str] = Counter()

    def counted(of: type, name: str) -> None:
        original = getattr(of, name)

        def count(*arguments: Any, **options: Any) -> Any:
            num_looks[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(of, name, count)

    counted(WaitingQueue, "candidates")
    counted(TenantUsage, "has_claim")
    counted(InFlightPrefixes, "is_in_flight")
    work = []
    for num_tenants in (50, 100):
        driver = wait(num_tenants)
        driver.steps(3)
        num_looks.clear()
        driver.step()
        assert len(driver.scheduler.waiting.tenants) == num_tenants
        work.append(dict(num_looks))
    assert work[0] == work[1]


@pytest.mark.parametrize("wait", [waiting_for_one_load, waiting_for_look_ups])
def test_with_no_slot_free_nobody_asks_which_of_many_loads_are_over(
    wait: Callable[[int], Driver], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With 5,000 that waited for look-ups, steps took 3.8 ms instead of 0.6."""
    driver = wait(40)
    driver.step()
    driver.loader.look_up = Loader().look_up  # type: ignore[method-assign]
    for number in range(7):
        driver.add(unlike(6000 + 100 * number, 1), max_new=60, tenant=f"runs {number}")
    driver.step()
    assert len(driver.scheduler.running) == 8
    asked: list[SequenceGroup] = []
    monkeypatch.setattr(PrefixLoads, "over", lambda self, groups: asked.extend(groups) or [])
    driver.step()
    assert len(driver.scheduler.waiting) == 40
    assert not asked


def test_tenants_stay_in_turn_that_wait_for_a_prompt_that_gets_no_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lost their turns and got them back in each step: with 500 tenants, it took a third longer."""
    driver = waiting_for_a_prompt_without_tokens(10)
    driver.steps(2)
    assert len(driver.scheduler.running) == 2
    changes: list[str] = []
    monkeypatch.setattr(FairShares, "set_waits_for", lambda self, tenant, waits_for: changes.append(tenant))
    driver.step()
    assert not changes


def test_nobody_loses_its_turn_for_a_prompt_that_is_about_to_start(waits: Counter[WaitsFor]) -> None:
    """It may still not fit; all that would wait for it would be in turn again in the same step."""
    driver = SchedulerDriver(budget=64)
    driver.add_several(8, 4, max_new=60, tenant="greedy")
    driver.steps(2)
    common = prompt(900)
    for number in range(5):
        driver.add([*common, number], tenant=f"{number}")
    waits.clear()
    driver.steps(2)
    assert driver.scheduler.num_preemptions == 1
    assert waits == {WaitsFor.PREFIX: 4}


def test_a_tenant_whose_load_is_done_comes_first_although_its_next_request_waits_for_a_prompt_in_progress(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    driver = Driver(max_num_seqs=6)
    driver.scheduler._max_num_batched_tokens = 16
    for number in range(4):
        driver.add(unlike(5000 + 100 * number, 1), max_new=60, tenant="greedy")
    in_progress = unlike(3000, 30)
    driver.add(in_progress, tenant="runs")
    driver.step()
    loaded = driver.add([*STEM[: 30 * SIZE], 1], tenant="waits")
    driver.add([*in_progress, 1], tenant="waits")
    driver.step()
    assert driver.scheduler.shares.waits_for("waits") is WaitsFor.LOAD
    driver.add(unlike(5500, 1), max_new=60, tenant="greedy")
    driver.steps(2)
    driver.loader.finish()
    driver.loads.publish_done()
    with monkeypatch.context() as patch:
        patch.setattr(Scheduler, "_has_tokens_in_flight", True)
        assert driver.scheduler.schedule() == []  # as the others' tokens are needed for preempting one
    driver.step()
    assert loaded in driver.scheduler.running


def test_a_request_that_is_gone_is_not_kept_until_the_next_step() -> None:
    driver = waiting_for_one_load(1)
    driver.step()
    (waits,) = driver.scheduler.waiting
    held = weakref.ref(waits)
    driver.scheduler.remove(waits)
    del waits
    driver.loads.publish_done()  # the load that nobody waits for ends
    gc.collect()
    assert held() is None


def order_of_requests(seed: int) -> list[tuple[int, int]]:
    """Which of some made-up requests run in each step; loads, look-ups and prompts in progress are waited for."""
    rng = random.Random(seed)
    shares = {"0": TenantShare(weight=2), "1": TenantShare(max_num_seqs=1)}
    driver = Driver(rng.choice([2, 4, 8]), shares, rng.choice([None, 0.001]), rng.choice([1, 32]))
    driver.scheduler._max_num_batched_tokens = rng.choice([32, 512])
    look_up, queued = driver.loader.look_up, list[LookUp]()
    if rng.random() < 0.6:
        driver.loader.look_up = queued.append  # type: ignore[method-assign]
    order = []
    for step in range(300):
        for _ in range(rng.choice([0, 0, 1, 4]) if step < 60 else 0):
            stem = rng.choice([STEM[: 30 * SIZE], SHORT_STEM, unlike(9000, 30)])[: SIZE * rng.choice([5, 20, 30])]
            own = unlike(20_000 + 200 * driver.scheduler.shares._num_charges + 200_000 * step, rng.randint(1, 12))
            driver.add([*stem, *own], rng.choice([1, 8, 20]), str(rng.randrange(12)), rng.choice(["", "", "n"]))
        driver.now += rng.choice([0, 0, 0.01, 0.3])
        driver.step()
        order += [(step, group.request.arrival) for group in driver.scheduler.running]
        if rng.random() < 0.3:
            driver.loader.finish_first()
        if rng.random() < 0.2 and driver.scheduler.waiting:
            driver.scheduler.remove(rng.choice(list(driver.scheduler.waiting)))
        if rng.random() < 0.3:
            for each in queued:
                look_up(each)
            queued.clear()
    return order


@pytest.mark.parametrize("seed", range(6))
def test_the_order_is_that_of_looking_at_all_tenants_in_each_step(
    seed: int, waits: Counter[WaitsFor], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = order_of_requests(seed)
    assert waits[WaitsFor.TURN], "no wait was over"
    monkeypatch.setattr(TenantWaits, "add", lambda *_: None)
    assert order_of_requests(seed) == made


def test_what_was_loaded_starts_although_another_computes_a_part_of_it() -> None:
    """It had begun to wait for that part, too, and went on doing so when all of its prefix was loaded."""
    driver = Driver(seconds_per_token=0.01)
    waits = driver.add([*STEM[: 40 * SIZE], *unlike(8000, 1)], tenant="a")
    driver.step()
    driver.loader.look_up = lambda look_up: None  # type: ignore[method-assign]
    computes = driver.add([*STEM[: 20 * SIZE], *unlike(8100, 1)], tenant="b")
    driver.now = 2.0
    driver.scheduler._max_num_batched_tokens = 16
    driver.step()
    driver.add(unlike(8200, 1), tenant="a")  # so that what its tenant waits for is looked at
    driver.step()
    driver.loader.finish()
    driver.step()
    assert computes.num_pending > 1
    assert waits in driver.scheduler.running
    assert waits.request.num_cached_tokens == 40 * SIZE


def test_a_tenant_is_in_turn_again_as_soon_as_another_of_its_requests_can_start() -> None:
    driver = waiting_for_one_load(1)
    driver.steps(2)
    short = driver.add(unlike(7500, 1), tenant="0")
    driver.step()
    assert short in driver.scheduler.running


def test_all_start_once_their_waits_are_over_of_which_nothing_is_kept() -> None:
    loading, in_flight = waiting_for_one_load(20), waiting_for_a_prompt_in_progress(20)
    for driver in (loading, in_flight):
        driver.steps(2)
    kept = (
        loading.scheduler.admission._tenant_waits._for_loads,
        in_flight.scheduler.admission._tenant_waits._for_prefixes,
    )
    assert all(kept)
    loading.finish_running_and_waiting()
    in_flight.run()
    assert not any(kept)


def test_tenants_come_back_into_turn_while_others_are_served() -> None:
    shares = FairShares()
    for tenant in "abcd":
        shares.set_waiting(tenant, 1)
    for tenant in "ac":
        shares.set_waits_for(tenant, WaitsFor.PREFIX)
    served = []
    for turn in shares.in_turn(WaitsFor.TURN, WaitsFor.LOAD):
        served.append(turn.tenant)
        shares.set_waits_for(turn.tenant, WaitsFor.LOAD)
        shares.set_waits_for("a", WaitsFor.TURN)  # it would have been the first
        shares.set_waits_for("c", WaitsFor.TURN)
    assert served == ["b", "c", "d"]
    assert shares.floor == 0
