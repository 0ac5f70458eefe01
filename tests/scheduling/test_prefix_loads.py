"""Groups that wait for prefixes from tiers: the real scheduler and cache, a loader and a clock that tests control."""

from __future__ import annotations

import sys

import pytest
from support.prefix_load_driver import SHORT_STEM, SIZE, STEM, Driver, unlike

from radixkv.cache import BlockTable
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.tiers.moves.load import LookUp


def test_two_that_were_loaded_and_evicted_do_not_yield_to_each_other_for_ever() -> None:
    """A third group, admitted meanwhile, evicts a part of their common load; each used to leave the blocks to the other."""
    driver = Driver()
    waiting = [driver.add([*STEM, *unlike(1000, 20)]), driver.add([*STEM, *unlike(2000, 30)])]
    driver.step()
    other = driver.add(unlike(5000, 25), max_new=80)
    driver.step()
    driver.loader.finish()
    while other in driver.scheduler.running:
        driver.step()
    assert driver.num_cached(waiting[0]) < 60, "the test needs that a part is evicted"
    for _ in range(20):
        computes = driver.step() > 0
        # Otherwise the engine fails the first one without room, as one that can never fit.
        assert computes or driver.loads.in_progress or not driver.scheduler.waiting
        driver.loader.finish()
    assert not driver.scheduler.waiting
    assert not driver.scheduler.running
    assert [group.request.num_cached_tokens for group in waiting] == [60 * SIZE] * 2


def test_one_that_yields_to_a_group_that_can_never_fit_does_not_make_the_engine_wait() -> None:
    """Beside pinned blocks, the group that joined another's load had no room, ever; both waited for the other to go first."""
    driver = Driver()
    pinned = driver.add(unlike(8000, 20), max_new=1)
    driver.finish_running_and_waiting()
    driver.cache.pin(pinned.prefill_token_ids)
    fits, never_fits = driver.add([*STEM, *unlike(1000, 2)]), driver.add([*STEM, *unlike(2000, 30)])
    driver.step()
    driver.loader.finish()
    driver.step()
    assert fits in driver.scheduler.running
    yields = driver.add([*SHORT_STEM, *unlike(4000, 35)])
    driver.finish_running()
    driver.steps(3)
    assert yields in driver.scheduler.waiting
    assert driver.scheduler.admission.first_without_room is never_fits
    assert not driver.loads.in_progress  # so that the engine fails the one that never fits
    driver.scheduler.remove(never_fits)
    driver.step()
    driver.loader.finish()
    driver.step()
    assert yields in driver.scheduler.running


def test_a_load_for_which_there_is_no_room_does_not_count_as_a_use() -> None:
    """Each step in which a group waited for room used to count as one use of what is cached of its prompt."""
    driver = Driver()
    driver.add(STEM[: 10 * SIZE], max_new=1)
    driver.finish_running_and_waiting()
    driver.add(unlike(5000, 60), max_new=80)
    driver.step()
    driver.add([*STEM, *unlike(1000, 2)])
    before, num_loads = driver.uses_of(STEM), driver.loads.num_loads
    driver.steps(5)
    assert driver.loads.num_loads == num_loads
    assert driver.uses_of(STEM) == before


def test_a_load_takes_no_block_that_a_running_group_is_about_to_need() -> None:
    driver = Driver()
    driver.add(list(range(5000, 5150)), max_new=80)
    driver.step()
    driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    assert driver.cache.num_available_blocks == 62  # as many as its prompt has
    assert driver.loads.num_loads == 0
    driver.finish_running()
    driver.step()
    assert driver.loads.num_loads == 1


def test_one_that_shares_the_beginning_of_a_load_claims_what_it_needs_besides() -> None:
    """All blocks of the load used to be subtracted from its need, even others': a negative claim hid other groups' claims."""
    driver = Driver()
    driver.add([*STEM, *unlike(1000, 20)])
    short = driver.add([*STEM[: 2 * SIZE], *unlike(2000, 3)])
    driver.step()
    driver.step()
    assert driver.claim_of(short).loading
    assert driver.claim_of(short).num_blocks == 3


def test_nobody_waits_for_a_load_of_another_namespace() -> None:
    driver = Driver()
    for number, namespace in enumerate("ab"):
        driver.add([*SHORT_STEM, *unlike(1000 * number + 1000, 2)], namespace=namespace)
        driver.step()
    assert driver.loads.num_loads == 2


def test_the_time_before_a_request_joins_a_load_is_not_time_that_it_waited_for_it() -> None:
    """Its ``load_seconds`` used to be those of the whole load, and more than it had existed."""
    driver = Driver()
    first = driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    driver.now = 2.0
    joins = driver.add([*STEM, *unlike(2000, 2)])
    driver.step()
    driver.now = 3.0
    driver.loader.finish()
    driver.step()
    assert [group.request.metrics.load_seconds for group in (first, joins)] == [3.0, 1.0]
    assert first.request.metrics.loaded_tokens == joins.request.metrics.loaded_tokens == {"tier": 60 * SIZE}


def test_no_tenant_is_preempted_for_a_group_that_leaves_blocks_to_others() -> None:
    """It would not be admitted in that step; the preempted one would be, and preempted again and again."""
    driver = Driver(max_num_seqs=2)
    driver.add([*STEM, *unlike(1000, 20)], tenant="a")
    driver.step()
    yielding = driver.add([*SHORT_STEM, *unlike(3000, 10)], tenant="b")
    driver.step()
    assert driver.claim_of(yielding).yields
    for number in range(2):
        driver.add(unlike(5000 + 100 * number, 1), max_new=16, tenant="a")
    driver.steps(6)
    assert len(driver.scheduler.running) == 2
    assert driver.scheduler.num_preemptions == 0
    for _ in range(2):  # the other's load, and then its own
        driver.loader.finish()
        assert driver.scheduler.num_preemptions == 0
        driver.step()
    assert driver.scheduler.num_preemptions == 1
    assert yielding in driver.scheduler.running
    driver.finish_running_and_waiting()
    assert yielding.request.num_cached_tokens == 20 * SIZE


def test_a_tenant_is_preempted_for_a_prefix_once_that_is_loaded() -> None:
    """It was preempted as soon as the prefix was found, and went on in the same step, because the load began."""
    driver = Driver(max_num_seqs=2)
    running = [driver.add(unlike(5000 + 100 * number, 1), max_new=100, tenant="a") for number in range(2)]
    driver.step()
    loading = driver.add([*STEM, *unlike(1000, 2)], tenant="b")
    driver.steps(2)
    assert driver.loads.num_loads == 1
    assert driver.scheduler.num_preemptions == 0
    driver.loader.finish()
    driver.step()
    assert list(driver.scheduler.running) == [running[0], loading]
    assert driver.scheduler.num_preemptions == 1


def test_what_others_are_preempted_for_is_loaded_into_their_blocks() -> None:
    driver = Driver(max_num_seqs=2)
    for number in range(2):
        driver.add(unlike(5000 + 200 * number, 30), max_new=100, tenant="a")
    driver.step()
    loading = driver.add([*STEM, *unlike(1000, 2)], tenant="b")
    driver.step()
    assert driver.scheduler.num_preemptions == 1
    assert driver.loads.num_loads == 1
    driver.loader.finish()
    driver.step()
    assert loading in driver.scheduler.running
    assert loading.request.num_cached_tokens == 60 * SIZE


def test_a_tenant_is_preempted_for_the_blocks_of_a_prefix_once_that_is_loaded() -> None:
    """It was preempted for what follows the prefix before the load began, and then went on in the same step."""
    driver = Driver()
    for number in range(2):
        driver.add(unlike(5000 + 200 * number, 30), max_new=100, tenant="a")
    driver.step()
    loading = driver.add([*STEM[: 25 * SIZE], *unlike(1000, 20)], tenant="b")
    driver.steps(3)
    assert driver.loads.num_loads == 1
    assert driver.scheduler.num_preemptions == 0
    driver.loader.finish()
    driver.steps(2)
    assert loading in driver.scheduler.running
    assert driver.scheduler.num_preemptions == 1
    assert loading.request.num_cached_tokens == 25 * SIZE


def test_no_tenant_is_preempted_for_a_load_that_would_then_leave_the_blocks_to_others() -> None:
    """One was preempted in every step, and went on in the same one, until the others' load was done."""
    driver = Driver(shares={"b": TenantShare(weight=2)})
    for number in range(3):
        driver.add(unlike(5000 + 200 * number, 20), max_new=100, tenant="a")
    driver.step()
    loading = driver.add([*STEM[: 8 * SIZE], *unlike(1000, 22)], tenant="c")
    driver.step()
    assert driver.claim_of(loading).num_blocks == 22
    yielding = driver.add([*SHORT_STEM, *unlike(3000, 14)], tenant="b")
    driver.steps(5)
    assert driver.scheduler.num_preemptions == 0
    assert driver.loads.num_loads == 1
    driver.finish_running_and_waiting()
    assert yielding.request.num_cached_tokens == 20 * SIZE


def test_what_gave_way_does_not_resume_because_decoding_evicts_what_is_reused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding took a block once room was made: of the other's prefix, which was looked for anew while its slot was taken."""
    driver = Driver(max_num_seqs=2)
    cached = unlike(5000, 40)
    driver.add(cached, max_new=1)
    driver.finish_running()
    running = [driver.add(unlike(6000 + 400 * i, 29)[:-1], max_new=60, tenant="a") for i in range(2)]
    driver.step()
    while driver.cache.num_free_blocks or len(running[0].sequences[0].token_ids) % SIZE != 1:
        driver.step()
    waiting = driver.add([*cached, *unlike(7000, 1)], tenant="b")
    look_ups: list[LookUp] = []
    with monkeypatch.context() as slow:
        slow.setattr(driver.loader, "look_up", look_ups.append)
        driver.step()
    (look_up,) = look_ups
    driver.loader.look_up(look_up)
    assert list(driver.scheduler.running) == running
    assert driver.scheduler.num_preemptions == 0
    driver.step()
    assert waiting in driver.scheduler.running
    assert driver.scheduler.num_preemptions == 1


def test_nothing_is_loaded_for_groups_for_which_no_slot_can_be_had() -> None:
    """All that waited were looked at in each step, loads began for the first ones, and the others left them the blocks."""
    driver = Driver(max_num_seqs=1)
    running = driver.add(unlike(5000, 1), max_new=20, tenant="a")
    driver.step()
    waiting = [
        driver.add([*STEM[: 40 * SIZE], *unlike(6000 + 100 * i, 1)], tenant=f"b{i}", namespace=f"{i}") for i in range(3)
    ]
    driver.steps(5)
    assert list(driver.scheduler.running) == [running]
    assert driver.loads.num_loads == 0
    assert not any(driver.claim_of(group).yields for group in waiting)
    driver.finish_running_and_waiting()
    assert [group.request.num_cached_tokens for group in waiting] == [40 * SIZE] * 3


def test_loads_begin_in_steps_that_have_no_token_left_for_prompts() -> None:
    driver = Driver()
    driver.add(unlike(5000, 1), max_new=20, tenant="stream")
    driver.step()
    driver.scheduler._max_num_batched_tokens = 1
    driver.add([*STEM, 1], tenant="waits")
    driver.step()
    assert driver.loads.num_loads == 1


def test_of_many_tenants_that_wait_for_loads_few_are_looked_at_to_give_them_room() -> None:
    """All were, in each step, as each of them left blocks to the first one."""
    driver = Driver(max_num_seqs=2)
    for number in range(2):
        driver.add(unlike(5000 + 100 * number, 1), max_new=20, tenant="a")
    driver.step()
    waiting = [
        driver.add(
            [*STEM[: 30 * SIZE], *unlike(6000 + 400 * number, 1 if number else 25)],
            tenant=f"b{number}",
            namespace=f"{number}",
        )
        for number in range(50)
    ]
    waiting += [
        driver.add([*STEM[: 40 * SIZE], *unlike(90_000 + 400 * number, 1)], tenant=f"c{number}", namespace=f"c{number}")
        for number in range(50)
    ]
    driver.steps(3)
    assert driver.loads.num_loads > 0
    assert 0 < sum(driver.claim_of(group).yields for group in waiting) < driver.scheduler.waiting.window
    driver.finish_running_and_waiting()
    assert all(group.request.num_cached_tokens for group in waiting)


def test_of_many_tenants_that_leave_blocks_to_a_load_few_are_looked_at() -> None:
    """With a slot free, all were, in each step: 500 took 37 ms."""
    driver = Driver()
    driver.add([*STEM[: 30 * SIZE], *unlike(1000, 25)], tenant="a")
    driver.step()
    waiting = [
        driver.add([*SHORT_STEM, *unlike(6000 + 400 * number, 10)], tenant=f"b{number}", namespace=f"{number}")
        for number in range(40)
    ]
    driver.steps(2)
    assert sum(driver.claim_of(group).yields for group in waiting) == driver.scheduler.waiting.window


def test_one_that_leaves_blocks_to_others_does_not_wait_for_all_that_arrive() -> None:
    """As long as loads of others began, it left its blocks to each of them, however often they had overtaken it."""
    driver = Driver(max_overtaken=5)
    others = [driver.add([*STEM[: 30 * SIZE], *unlike(1000, 14)], max_new=1, tenant="a")]
    driver.step()
    large = driver.add([*SHORT_STEM, *unlike(3000, 50)], tenant="b")
    while not large.started:
        number = len(others)
        prompt = [*STEM[: 30 * SIZE], *unlike(10_000 + 400 * number, 14)]
        others.append(driver.add(prompt, max_new=1, tenant=f"c{number}", namespace=f"{number}"))
        driver.step()
        if number % 2:
            driver.loader.finish_first()
        assert sum(group.started for group in others) < 10
    assert large.request.num_cached_tokens == 20 * SIZE


def test_one_for_which_others_wait_leaves_no_blocks_to_them() -> None:
    """It waited for their blocks, and they for it, for ever, where a block was pinned."""
    driver = Driver(max_overtaken=0)
    pinned = driver.add(unlike(8000, 5), max_new=1)
    driver.finish_running_and_waiting()
    driver.cache.pin(pinned.prefill_token_ids)
    loaded = driver.add([*STEM[: 30 * SIZE], *unlike(1000, 20)], tenant="a")
    driver.step()
    driver.add(unlike(5000, 50), max_new=5, tenant="c")
    driver.step()
    driver.loader.finish()
    driver.finish_running()
    driver.add(unlike(6000, 1), tenant="a")  # so that it is the other tenant's turn
    first = driver.add([*SHORT_STEM, *unlike(3000, 35)], tenant="b")
    driver.step()
    assert driver.claim_of(first).yields
    for _ in range(30):
        driver.step()
        driver.loader.finish()
    assert first.request.num_cached_tokens == 20 * SIZE
    assert loaded.request.num_cached_tokens == 30 * SIZE
    assert not driver.scheduler.waiting


def test_what_is_in_the_pool_for_others_anyway_is_not_claimed() -> None:
    """After a load, a claim used to count the whole prompt, so others left it blocks that it did not need."""
    driver = Driver()
    head = STEM[: 10 * SIZE]
    running = driver.add([*head, *unlike(4000, 1)], max_new=60)
    driver.step()
    driver.loader.finish()
    driver.step()
    assert running in driver.scheduler.running
    loading = driver.add([*STEM[: 40 * SIZE], *unlike(1000, 5)])
    driver.step()
    claim = driver.claim_of(loading)
    assert claim.num_blocks == 5
    driver.loader.finish()
    driver.loads.publish_done()
    assert claim.num_blocks == 35  # 30 were loaded and can be evicted; the head is the running one's


def test_a_step_does_not_go_through_all_that_wait_for_each_that_is_looked_at() -> None:
    """Others' claims used to be summed for each of them in every step, although few of those that wait are looked at."""

    def lines_of_a_step(num_waiting: int) -> int:
        driver = Driver()
        driver.add([*STEM, *unlike(1000, 20)])
        driver.step()
        groups = [driver.add([*SHORT_STEM, *unlike(3000 + 100 * n, 10)]) for n in range(num_waiting)]
        driver.step()
        assert all(driver.claim_of(group).yields for group in groups[:10])
        count = 0

        def trace(frame: object, event: str, arg: object) -> object:
            nonlocal count
            count += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)  # type: ignore[arg-type]
        try:
            driver.step()
        finally:
            sys.settrace(before)
        return count

    assert lines_of_a_step(200) < 1.2 * lines_of_a_step(40)


def test_a_load_that_cannot_get_its_blocks_leaves_no_table_open(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver()
    driver.add([*STEM, *unlike(1000, 2)])
    reserve = driver.cache.reserve

    def fail_late(table: BlockTable, num_tokens: int) -> None:
        reserve(table, num_tokens)
        raise MemoryError("no memory")

    with monkeypatch.context() as patch:
        patch.setattr(driver.cache, "reserve", fail_late)
        with pytest.raises(MemoryError):
            driver.step()
    assert driver.cache.num_free_blocks == 100
    driver.cache.check()
    driver.finish_running_and_waiting()
    assert driver.cache.num_available_blocks == 100
