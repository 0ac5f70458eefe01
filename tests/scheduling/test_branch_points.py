"""Where prompts part inside a block that cannot be split, what they have in common of it is computed once."""

from __future__ import annotations

import pytest
from support.scheduler_driver import STEMS, SchedulerDriver, tail, warm

BLOCK_SIZE = 64
STEM = [*range(1000, 1100)]  # a whole block, and 36 tokens of the next


def driver_with_states(**options: int) -> SchedulerDriver:
    return SchedulerDriver(block_size=BLOCK_SIZE, splits_blocks=False, **{"budget": 512, **options})


def test_the_second_prompt_that_parts_there_keeps_what_the_others_begin_with() -> None:
    driver = driver_with_states()
    num_computed = []
    for number in range(4):
        driver.num_computed_tokens = 0
        driver.add([*STEM, *tail(number, 20)], max_new=1)
        driver.run()
        num_computed.append(driver.num_computed_tokens)
    assert num_computed == [120, 56, 20, 20]
    driver.cache.check()


def test_prompts_that_arrive_together_wait_for_what_they_have_in_common() -> None:
    driver = driver_with_states()
    for number in range(8):
        driver.add([*STEM, *tail(number, 20)], max_new=1)
    (first,) = driver.step()
    assert (first.num_tokens, first.completes) == (100, False)
    assert [chunk.num_tokens for chunk in driver.step()] == [20] * 8
    driver.run()
    assert driver.cache.match([*STEM, 7]) == 100


def test_the_same_prompt_again_computes_its_last_token() -> None:
    driver = driver_with_states()
    for _ in range(3):
        driver.num_computed_tokens = 0
        driver.add(STEM, max_new=1)
        driver.run()
    assert driver.num_computed_tokens == 1


def test_of_points_near_one_another_the_first_serves_all() -> None:
    """Answers to questions that begin alike by chance."""
    driver = driver_with_states()
    for common in (12, 5, 0, 8):
        driver.add([*STEM, *STEMS[0][:common], *tail(common, 20)], max_new=1)
    assert [chunk.num_tokens for chunk in driver.step()] == [100]
    # The second waits for the point that it asked for, a step longer than those that came after the first point was known.
    assert [chunk.num_tokens for chunk in driver.step()] == [32, 20, 28]
    assert 25 in [chunk.num_tokens for chunk in driver.step()]
    driver.run()


def test_points_far_apart_are_all_kept() -> None:
    driver = driver_with_states()
    for common in (40, 25, 0):
        driver.add([*STEM, *STEMS[0][:common], *tail(common, 20)], max_new=1)
    assert [chunk.num_tokens for chunk in driver.step()] == [100]
    driver.run()
    assert [driver.cache.match([*STEM, *STEMS[0][:common], 7]) for common in (10, 25, 30)] == [100, 125, 128]


@pytest.mark.parametrize(("common", "expected"), [(70, 64), (79, 64), (80, 80), (64, 64), (50, 50), (15, 0)])
def test_nothing_is_kept_for_a_few_tokens(common: int, expected: int) -> None:
    driver = driver_with_states()
    warm(driver, STEM)
    driver.add([*STEM[:common], *tail(1, 30)], max_new=1)
    driver.run()
    assert driver.cache.match([*STEM[:common], 7]) == expected


def test_a_point_behind_what_is_computed_is_none() -> None:
    driver = driver_with_states(budget=110)
    driver.add([*STEM, *tail(1, 60)], max_new=1)
    driver.step()
    driver.add([*STEM, *tail(2, 60)], max_new=1)
    driver.run()
    assert driver.num_computed_tokens == 160 + 96
    driver.cache.check()


def test_nothing_is_kept_where_nothing_is_written_or_no_block_is_left() -> None:
    driver = driver_with_states(num_blocks=3)
    warm(driver, [*STEM, *tail(0, 20)])
    assert driver.cache.num_free_blocks == 1
    driver.add([*STEM, *tail(1, 20)], max_new=1, write_cache=False)
    driver.run()
    assert driver.cache.match([*STEM, 7]) == BLOCK_SIZE
    driver.add([*STEM, *tail(1, 80)], max_new=1)
    driver.run()
    assert driver.cache.match([*STEM, *tail(1, 28)]) == 128
    driver.cache.check()
