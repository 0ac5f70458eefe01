"""Loads that take long, hang, or are given up: who waits for them, and what they say about their tier."""

from __future__ import annotations

import threading

import pytest
from support.prefix_load_driver import SHORT_STEM, SIZE, STEM, Driver, unlike

from radixkv.routing import PrefillRate
from radixkv.tiers.moves.load import LookUp
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.stack import Span


def test_a_load_that_hangs_is_given_up_though_nobody_looks_at_those_that_wait_for_it() -> None:
    """All slots are taken, so no waiting group is looked at; the load used to keep its blocks all that time."""
    driver = Driver(max_num_seqs=1)
    driver.add([*STEM, *unlike(2000, 30)])
    driver.step()
    other = driver.add(unlike(5000, 5), max_new=60)
    driver.step()
    assert other in driver.scheduler.running
    assert driver.cache.num_available_blocks < 40
    driver.give_up()
    assert other in driver.scheduler.running
    assert driver.loads.num_given_up == 1
    assert driver.cache.num_available_blocks > 90
    while driver.scheduler.waiting or driver.scheduler.running:
        assert driver.step()
    assert driver.loads.num_loads == 1


def test_loads_that_are_given_up_behind_a_slow_one_do_not_count_as_slow() -> None:
    """Each used to report that its tier took all that time, though others were being read: long after, nothing was loaded."""
    driver = Driver(seconds_per_token=0.01)
    driver.add([*STEM[: 20 * SIZE], *unlike(1000, 2)])
    driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    driver.give_up()
    assert driver.loads.num_given_up == 2
    driver.loader.finish()
    driver.finish_running()
    driver.add([*STEM, *unlike(3000, 2)])
    driver.step()
    assert driver.loads.num_loads == 3
    assert driver.loads.num_not_worth_it == 0


def test_nothing_is_loaded_while_a_load_that_was_given_up_is_still_being_read() -> None:
    driver = Driver()
    driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    driver.loader.read_first()
    driver.give_up()
    assert driver.loads.num_given_up == 1
    computing = driver.add([*STEM, *unlike(3000, 2)])
    driver.step()
    assert computing in driver.scheduler.running
    assert driver.loads.num_loads == 1
    driver.finish_running()
    driver.loader.finish()
    driver.cache.clear()
    driver.add([*SHORT_STEM, *unlike(4000, 2)])
    driver.step()
    assert driver.loads.num_loads == 2


def test_a_load_of_which_nothing_came_counts_as_slow() -> None:
    driver = Driver(seconds_per_token=0.01)
    driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    driver.loader.read_first()
    driver.give_up()
    driver.loader.finish()
    driver.finish_running()
    driver.add([*STEM, *unlike(3000, 2)])
    driver.step()
    assert driver.loads.num_loads == 1
    assert driver.loads.num_not_worth_it == 1


def test_a_short_prompt_does_not_wait_for_a_long_load_of_which_it_shares_a_block() -> None:
    """It used to wait for the whole load, however little of it it wanted: up to twice the long prompt's computing time."""
    driver = Driver(seconds_per_token=0.01)
    driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    short = driver.add([*STEM[:SIZE], *unlike(2000, 2)])
    driver.step()
    driver.now = 0.2  # computing the block takes 0.04 s, and the load may take 4.85 s
    driver.step()
    assert short in driver.scheduler.running
    assert driver.loads.num_given_up == 0


def test_one_that_no_longer_waits_for_a_load_claims_nothing() -> None:
    driver = Driver(seconds_per_token=0.01)
    first = driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    large = driver.add([*STEM[:SIZE], *unlike(2000, 45)])
    driver.step()
    assert driver.claim_of(large).loading
    driver.now = 0.2  # as in the test before this one
    driver.step()
    assert large in driver.scheduler.waiting
    assert driver.loads._claims.of_others(driver.claim_of(first)) == 0
    driver.finish_running_and_waiting()
    assert driver.loads.num_loads == 1
    assert first.request.num_cached_tokens == 60 * SIZE


def test_a_load_that_takes_longer_than_computing_what_is_shared_is_not_waited_for() -> None:
    driver = Driver(seconds_per_token=0.01)
    driver.loads._rates.observe_load(0, 100, 2.0)
    driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    sharing = [driver.add([*STEM[: num_blocks * SIZE], *unlike(2000, 2)]) for num_blocks in (1, 50)]
    driver.step()
    assert list(driver.scheduler.running) == sharing[:1]
    driver.step()
    assert driver.claim_of(sharing[1]).loading
    assert driver.loads.num_loads == 1


def test_a_load_that_is_given_up_before_it_is_read_keeps_no_other_from_being_loaded() -> None:
    """Once a short load behind a long one was given up, all others used to be computed until the long one was read."""
    driver = Driver(seconds_per_token=0.01)
    driver.add([*STEM[: 40 * SIZE], *unlike(1000, 2)])
    driver.step()
    driver.add([*SHORT_STEM[:SIZE], *unlike(2000, 2)])
    driver.step()
    driver.now = 0.2
    driver.step()
    assert driver.loads.num_given_up == 1
    driver.add([*SHORT_STEM, *unlike(3000, 2)])
    driver.step()
    assert driver.loads.num_loads == 3


def test_a_look_up_that_waits_for_what_is_being_written_keeps_no_other_from_being_found() -> None:
    """The finder used to be taken for hanging: where writing was slow, all prefixes were computed until it was done."""
    driver = Driver()
    look_up, queued = driver.loader.look_up, list[LookUp]()

    def waits_for_writer(look_up: LookUp) -> None:
        look_up.waits_for_writer = True
        queued.append(look_up)

    driver.loader.look_up = waits_for_writer  # type: ignore[method-assign]
    slow = driver.add([*STEM, *unlike(1000, 2)])
    driver.step()
    driver.loader.look_up = look_up  # type: ignore[method-assign]
    driver.give_up()
    assert slow in driver.scheduler.running
    driver.add([*SHORT_STEM, *unlike(3000, 2)])
    driver.step()
    assert driver.loads.num_loads == 1


def test_a_medium_that_hangs_in_the_middle_of_a_load_counts_as_slow() -> None:
    """Only the blocks that came quickly used to count: each prefix was waited for, given up, and then computed."""
    driver = Driver(seconds_per_token=0.01)
    driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    driver.loader.hang_after_first(8)
    driver.give_up()
    assert driver.loads.num_given_up == 1
    driver.loader.finish()
    driver.finish_running()
    driver.add([*STEM, *unlike(3000, 2)])
    driver.step()
    assert driver.loads.num_loads == 1
    assert driver.loads.num_not_worth_it == 1


def test_a_load_that_hangs_and_whose_request_is_gone_is_waited_for_by_no_other() -> None:
    driver = Driver(seconds_per_token=0.01)
    gone = driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    driver.loader.read_first()
    driver.scheduler.remove(gone)
    loading = driver.add([*STEM[: 20 * SIZE], *unlike(3000, 2)])
    driver.step()
    assert loading in driver.scheduler.waiting  # a chunk is read to its end, which takes a moment
    driver.now = 1e3
    computing = driver.add([*SHORT_STEM[: 10 * SIZE], *unlike(4000, 2)])
    driver.step()
    assert computing in driver.scheduler.running
    assert driver.loads.num_loads == 2


def test_what_loading_costs_is_not_forgotten_where_others_are_in_the_way() -> None:
    """Fifty that arrived together behind a long load used to make a tier seem ten times as fast as it is."""
    rates = Rates(1, prefill_rate := PrefillRate())
    prefill_rate.observe_step(100, 100, 1.0)
    rates.observe_load(0, 100, 1.0)
    spans = [Span(0, 0, 10)]
    before = rates.load_seconds(spans)
    for _ in range(50):
        assert not rates.choose_loading(spans, 10 * SIZE, 10.0)
    assert rates.load_seconds(spans) == before


def test_of_a_load_that_is_nearly_done_only_the_rest_is_in_the_way() -> None:
    """A load's whole time used to count until its end, so what could have been loaded behind it was computed."""
    driver = Driver(seconds_per_token=0.01)
    driver.loads._rates.observe_load(0, 100, 2.0)
    driver.add([*STEM[: 50 * SIZE], *unlike(1000, 2)])
    driver.step()
    driver.loader.hang_after_first(40)
    loading = driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()  # 0.2 s are left of 1.0 s; loading takes 0.4 s, and computing 0.8 s
    assert driver.claim_of(loading).loading
    assert driver.loads.num_loads == 2


@pytest.mark.parametrize("aborted", [False, True])
def test_no_step_waits_for_a_chunk_that_is_being_written(aborted: bool) -> None:
    """Writing to fresh memory is slow: giving a load up, or aborting its request, used to wait for a whole chunk."""
    driver = Driver()
    group = driver.add([*SHORT_STEM, *unlike(2000, 2)])
    driver.step()
    num_reserved = 100 - driver.cache.num_available_blocks
    begun, goes_on = threading.Event(), threading.Event()

    def write(*args: object) -> None:
        begun.set()
        goes_on.wait(20)  # a step that waits for it ends, but too late

    writing = driver.loader.write_first(8, write)
    assert begun.wait(60)
    driver.now = 1e3
    if aborted:
        driver.scheduler.remove(group)
    driver.step()
    assert writing.is_alive()
    assert driver.cache.num_available_blocks <= 100 - num_reserved
    goes_on.set()
    writing.join(60)
    driver.step()
    assert driver.num_cached(group) >= 8  # what was being written is kept
    assert driver.loads.num_given_up == (not aborted)
    driver.finish_running()
    assert driver.cache.num_available_blocks == 100
