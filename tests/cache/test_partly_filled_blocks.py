"""A partly filled block that is used again is kept like any other."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from support.cache_driver import leave

from radixkv.cache import LFU, LRU, Adaptive, CostAware, EvictionPolicy, PrefixCache, PriorityTTL, SegmentedLRU


@pytest.mark.parametrize("policy", [LRU, LFU, SegmentedLRU, CostAware, PriorityTTL])
@pytest.mark.parametrize("answer", [[], [8]])
def test_a_prompt_shorter_than_a_block_is_kept_while_it_is_used(
    policy: Callable[[], EvictionPolicy], answer: list[int]
) -> None:
    """Using a partly filled block again left its last use and uses as they were, so that the most used went first."""
    cache = PrefixCache(16, 4, policy(), clock=itertools.count().__next__)
    leave(cache, [7, 7, *answer])
    for number in range(20):
        assert cache.match([7, 7]) == 2
        leave(cache, [7, 7])
        for token in range(10, 17):
            leave(cache, [token, number])


def test_a_partly_filled_block_has_the_highest_priority_it_was_used_with() -> None:
    """That of its first sequence stayed, so what a request of a high priority used was evicted before other content."""
    cache = PrefixCache(4, 4, PriorityTTL(None))
    leave(cache, [1, 1], priority=0)
    leave(cache, [2, 2], priority=5)
    leave(cache, [1, 1], priority=9)
    leave(cache, [3] * 12)
    assert [cache.match([token] * 2) for token in (1, 2)] == [2, 0]


def test_uses_of_a_partly_filled_block_are_no_more_than_sequences_began_with_it() -> None:
    cache = PrefixCache(16, 4, LFU())
    leave(cache, [1, 2, 3, 4, 5])
    for uses in (2, 3):
        leave(cache, [1, 2, 3, 4, 5])
        (whole,) = cache.tree_snapshot()[""].children
        (tail,) = whole.children
        assert (whole.uses, tail.uses) == (uses, uses)
    table = cache.open([1, 2, 3, 4, 5])
    forks = cache.fork(table, 5)
    for fork in (table, *forks):
        cache.reserve(fork, 5)
        cache.append(fork, [5])
        cache.close(fork)
    (whole,) = cache.tree_snapshot()[""].children
    assert (whole.uses, whole.children[0].uses) == (4, 4)
    cache.check()


def test_a_short_end_counts_as_a_use_of_no_more_than_one_block() -> None:
    cache = PrefixCache(16, 2, LFU(), clock=itertools.count().__next__)
    leave(cache, [1, 2, 3, 4])
    leave(cache, [1])
    (long,) = cache.tree_snapshot()[""].children
    assert (long.uses, len(long.block_ids)) == (1, 2)


def test_adaptive_is_told_when_a_partly_filled_block_is_used_again() -> None:
    policy = Adaptive()
    cache = PrefixCache(8, 4, policy, clock=itertools.count().__next__)
    for _ in range(3):
        leave(cache, [1, 2])
    assert policy._lru._num_cached == cache.num_evictable_blocks == 1
    (leaf,) = policy.leaves()
    assert leaf.uses == 3
