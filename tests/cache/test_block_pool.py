"""The pool of physical blocks."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radixkv.cache import BlockPool, InvalidArgumentError, InvariantViolation, OutOfBlocks


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(-1, 40))))
def test_random_use_keeps_the_free_runs_right(num_blocks: int, steps: list[tuple[bool, int, int]]) -> None:
    pool = BlockPool(num_blocks)
    held: list[np.ndarray] = []
    for takes, count, pick in steps:
        if takes:
            try:
                blocks = pool.allocate(count, after=pick if pick >= 0 else None)
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


def test_a_sequence_grows_where_it_stands() -> None:
    pool = BlockPool(64)
    tails = [int(pool.allocate(1)[0]) for _ in range(4)]
    for _ in range(6):
        for number, tail in enumerate(tails):
            tails[number] = int(pool.allocate(1, after=tail)[0])
            assert tails[number] == tail + 1


def test_a_large_request_gets_one_run_where_there_is_one() -> None:
    pool = BlockPool(64)
    pool.allocate(1)
    blocks = pool.allocate(40)
    assert (np.diff(blocks) == 1).all()


def test_shared_blocks_are_free_only_when_all_owners_are_gone() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    pool.share(blocks)
    assert pool.release(blocks) == 0
    assert pool.release(blocks) == 2


@pytest.mark.parametrize("blocks", [[4], [-1], [0, 3]])
def test_foreign_and_free_blocks_cannot_be_released(blocks: list[int]) -> None:
    pool = BlockPool(4)
    (held,) = pool.allocate(1)
    with pytest.raises(InvalidArgumentError, match="blocks"):
        pool.release(np.array([held, *(b for b in blocks if b != held)], dtype=np.int32))
    assert pool.num_free == 3
    pool.check()


def test_check_sees_a_lost_block() -> None:
    pool = BlockPool(4)
    pool.ref_counts[2] = 1
    with pytest.raises(InvariantViolation, match="free with owners"):
        pool.check()
