"""The index says what replicas hold that tell it the truth, in bounded memory."""

from __future__ import annotations

import random

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


def test_what_is_removed_or_cleared_is_held_by_nobody() -> None:
    index = BlockIndex()
    index.add([1, 2, 3], 0)
    index.add([1, 2], 7)
    index.discard([3, 2], 0)
    assert depths(index, [1, 2, 3]) == {0: 1, 7: 2}
    index.clear(7)
    assert depths(index, [1, 2, 3]) == {0: 1}
    index.discard([1], 0)
    assert len(index) == 0


def test_memory_is_bounded_and_what_is_stored_again_is_kept() -> None:
    index = BlockIndex(max_blocks=100)
    for block in range(1000, 2000):
        index.add([1, block], block % 3)
        assert len(index) <= 100
    assert index.replicas(1) == 0b111
    assert index.replicas(1999) == 0b010
    assert index.replicas(1000) == 0


def test_a_bound_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="max_blocks: expected a whole number of at least 2, got 1"):
        BlockIndex(1)
