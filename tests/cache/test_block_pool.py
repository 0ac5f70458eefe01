"""The pool of physical blocks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import BlockPool, InvalidArgumentError, InvariantViolation, OutOfBlocks


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(-1, 40))), st.booleans())
def test_random_use_keeps_the_free_runs_right(num_blocks: int, steps: list[tuple[bool, int, int]], low: bool) -> None:
    pool = BlockPool(num_blocks)
    held: list[np.ndarray] = []
    for takes, count, pick in steps:
        if takes:
            try:
                blocks = pool.allocate(count, after=pick if pick >= 0 else None, low=low)
            except OutOfBlocks:
                assert count > pool.num_free
                continue
            assert len(set(blocks.tolist())) == count
            assert not {b for other in held for b in other.tolist()} & set(blocks.tolist())
            held.append(blocks)
        elif held:
            blocks = held.pop(pick % len(held))
            assert pool.release(blocks) == len(blocks)
        pool.check()
        assert pool.num_free == num_blocks - sum(map(len, held))


@pytest.mark.parametrize(
    ("after", "expected"),
    [(3, [4, 5, 0, 1]), (2, [0, 1, 4, 5]), (None, [0, 1, 4, 5]), (7, [0, 1, 4, 5])],
)
@pytest.mark.parametrize("filed", [False, True])
def test_all_that_is_free_is_taken_in_order_but_first_what_follows(
    after: int | None, expected: list[int], filed: bool
) -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    pool.release(blocks[[4, 0]])
    if filed:
        pool.release(np.array([pool.allocate_one()], dtype=np.int32))
    pool.release(blocks[[1, 5]])
    pool.check()
    taken = pool.allocate(4, after)
    assert taken.tolist() == expected
    assert taken.dtype == np.int32
    pool.check()
    assert pool.num_free == 0


def test_a_sequence_grows_where_it_stands() -> None:
    pool = BlockPool(64)
    tails = [int(pool.allocate(1)[0]) for _ in range(4)]
    for _ in range(6):
        for number, tail in enumerate(tails):
            tails[number] = int(pool.allocate(1, after=tail)[0])
            assert tails[number] == tail + 1


def test_a_sequence_grows_into_a_block_that_was_released_with_others() -> None:
    pool = BlockPool(8)
    blocks = pool.allocate(8)
    pool.release(blocks[7:])
    pool.release(blocks[3:5])
    assert pool.allocate_one(after=2) == 3


def test_low_blocks_are_taken_where_enough_of_them_follow_each_other() -> None:
    pool = BlockPool(64)
    first = pool.allocate(4)
    pool.release(first[:3])
    assert pool.allocate(3, low=True).tolist() == [0, 1, 2]
    assert pool.allocate(3, low=True).tolist() == [4, 5, 6]  # without `low`, amid the free blocks
    pool.release(first[3:])
    assert pool.allocate(2, low=True).tolist() == [7, 8]  # not 3, which is free alone
    assert pool.allocate(2, after=20, low=True).tolist() == [9, 10]
    assert pool.allocate(2, after=10, low=True).tolist() == [11, 12]
    assert pool.allocate(1, low=True).tolist() == [3]
    pool.check()


def test_a_large_request_gets_one_run_where_there_is_one() -> None:
    pool = BlockPool(64)
    pool.allocate(1)
    blocks = pool.allocate(40)
    assert (np.diff(blocks) == 1).all()


def test_shared_blocks_are_free_only_when_all_owners_are_gone() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert pool.release(blocks[:1]) == pool.release(blocks[1:]) == 0
    pool.share(blocks)
    assert pool.release(blocks) == 0
    assert pool.release(blocks[:1]) == pool.release(blocks[1:]) == 1


@pytest.mark.parametrize(
    "blocks", [[4], [-1], [1, 4], [-1, 1], [1, -1], [4, 1], [1, 3], [2], [1, 1], [0, 1, 0], [0, 1, 1]]
)
@pytest.mark.parametrize("call", [BlockPool.release, BlockPool.share])
def test_foreign_free_and_repeated_blocks_are_refused(call: Callable[..., object], blocks: list[int]) -> None:
    pool = BlockPool(4)
    assert pool.allocate(2).tolist() == [0, 1]
    with pytest.raises(InvalidArgumentError, match="blocks"):
        call(pool, np.array(blocks, dtype=np.int32))
    assert pool.ref_counts.tolist() == [1, 1, 0, 0]
    pool.check()


@pytest.mark.parametrize(
    "blocks",
    [0, None, [], [0], np.array([0.7]), np.array([0.0, 1.0]), np.array([[0, 1]]), np.array([True]), np.array(0)],
)
@pytest.mark.parametrize("call", [BlockPool.release, BlockPool.share])
def test_ids_of_blocks_are_an_array_of_whole_numbers(call: Callable[..., object], blocks: Any) -> None:
    """0.7 released block 0, and what has no length ended with a bare TypeError."""
    pool = BlockPool(4)
    pool.allocate(2)
    with pytest.raises(InvalidArgumentError, match="blocks: expected a one-dimensional array of ids, got"):
        call(pool, blocks)
    assert pool.ref_counts.tolist() == [1, 1, 0, 0]


def test_a_refusal_names_the_blocks_and_what_was_expected() -> None:
    pool = BlockPool(4)
    pool.allocate(2)
    for blocks, message in (
        ([0, 2, 3], r"blocks: \[2, 3\] are free already"),
        ([0, 9], r"blocks: expected ids from 0 to 3, got \[0, 9\]"),
        ([0, 0], r"blocks: expected distinct ids, got \[0, 0\]"),
    ):
        with pytest.raises(InvalidArgumentError, match=message):
            pool.release(np.array(blocks, dtype=np.int32))
    pool.allocate(2)
    for held in ([-1], [-1, 0], [3, 4]):
        with pytest.raises(InvalidArgumentError, match="expected ids from 0 to 3"):
            pool.release(np.array(held, dtype=np.int32))


@pytest.mark.parametrize("count", [-1, 1.0, True, "1"])
def test_impossible_counts_are_refused(count: Any) -> None:
    pool = BlockPool(4)
    with pytest.raises(InvalidArgumentError, match="count"):
        pool.allocate(count)
    assert pool.num_free == 4


def test_an_empty_pool_says_so() -> None:
    pool = BlockPool(2)
    pool.allocate(2)
    assert len(pool.allocate(0)) == 0
    for count, call in ((1, pool.allocate_one), (1, lambda: pool.allocate(1)), (2, lambda: pool.allocate(2))):
        with pytest.raises(OutOfBlocks) as caught:
            call()
        assert (caught.value.needed, caught.value.free, caught.value.evictable) == (count, 0, 0)
    pool.share(np.array([0, 1]), 2)
    assert pool.ref_counts.tolist() == [3, 3]
    assert pool.release(np.empty(0, dtype=np.int32)) == 0


def test_small_requests_are_spread_so_that_both_can_grow() -> None:
    pool = BlockPool(64)
    first, second = pool.allocate_one(), pool.allocate_one()
    assert abs(second - first) > 16
    assert pool.allocate(3, after=first).tolist() == [first + 1, first + 2, first + 3]
    before, last = pool.allocate(2).tolist()
    assert last == before + 1
    assert pool.ref_counts[[before - 1, before, last, last + 1]].tolist() == [0, 1, 1, 0]
    pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.ref_counts[2] = 1
    with pytest.raises(InvariantViolation, match="free with owners"):
        pool.check()
