"""The index says what replicas hold, as long as they report it truly, in bounded memory."""

from __future__ import annotations

import pickle
import random
from collections import deque
from typing import Any

import pytest

from radixkv.routing import BlockIndex


def depths(index: BlockIndex, hashes: list[int]) -> dict[int, int]:
    found = {}
    for mask, depth in index.hits(hashes):
        found.update({number: depth for number in range(mask.bit_length()) if mask >> number & 1})
    return found


def test_it_finds_how_far_each_replica_holds_a_prompt() -> None:
    rng = random.Random(0)
    for _ in range(300):
        prompt = [rng.getrandbits(63) for _ in range(rng.randint(1, 40))]
        index = BlockIndex()
        held = {number: rng.randint(0, len(prompt)) for number in rng.sample(range(20), rng.randint(0, 8))}
        for number, depth in held.items():
            index.add(prompt[:depth], number)
        assert depths(index, prompt) == {number: depth for number, depth in held.items() if depth}
        assert depths(index, []) == {}


def test_what_is_removed_or_cleared_is_held_by_no_replica() -> None:
    index = BlockIndex()
    index.add([1, 2, 3], 0)
    index.add([1, 2], 7)
    index.discard([3, 2], 0)
    assert depths(index, [1, 2, 3]) == {0: 1, 7: 2}
    index.clear(7)
    assert depths(index, [1, 2, 3]) == {0: 1}
    index.discard([1], 0)
    assert len(index) == 0


def test_a_replica_that_holds_nothing_is_cleared_without_a_look_at_what_others_hold() -> None:
    """Each one that joined an ingress held up all streams, for a tenth of a second for a million blocks of the others."""

    class Unvisited(dict[int, int]):
        def items(self) -> Any:
            raise AssertionError("visited")

    index = BlockIndex()
    index.add([1, 2], 0)
    index.add([1], 1)
    index.clear(1)
    index._entries = Unvisited(index._entries)
    for number in (1, 7):
        index.clear(number)
    assert depths(index, [1, 2]) == {0: 2}
    with pytest.raises(AssertionError, match="visited"):
        index.clear(0)


def test_memory_is_bounded_however_often_blocks_come_and_go() -> None:
    """Each set of replicas that ever held a block was kept: of 24 replicas there are 16 million."""
    rng = random.Random(0)
    index, held = BlockIndex(), set[tuple[int, int]]()

    def size() -> int:
        return len(pickle.dumps(index))

    def change(times: int) -> None:
        for _ in range(times):
            block, replica = rng.randrange(20), rng.randrange(24)
            (index.discard if (block, replica) in held else index.add)([block], replica)
            held.symmetric_difference_update({(block, replica)})

    change(2000)
    before = size()
    change(20_000)
    assert size() < 2 * before


def test_all_that_is_held_is_known_and_nothing_else_is_kept() -> None:
    """What replicas stored long ago is the prefix of all that came since: a bound by age used to forget it first."""
    rng = random.Random(0)
    index, held = BlockIndex(), [deque([1]) for _ in range(3)]
    for number in range(3):
        index.add([1], number)
    for block in range(10, 5000):
        number = rng.randrange(3)
        index.add([block], number)
        held[number].append(block)
        if len(held[number]) > 500:
            held[number].rotate(-1)  # the first block is never evicted
            index.discard([held[number].popleft()], number)
            held[number].rotate(1)
    assert index.replicas(1) == 0b111
    for number, blocks in enumerate(held):
        assert all(index.replicas(block) >> number & 1 for block in blocks)
    assert len(index) == len(set().union(*held))
    for number in range(3):
        index.clear(number)
    assert len(index) == 0
