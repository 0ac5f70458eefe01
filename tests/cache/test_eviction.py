"""Which leaf is evicted first, and that what is evicted is counted."""

from __future__ import annotations

import pytest
from support.cache_driver import leave, press

from radixkv.cache import LFU, LRU, Adaptive, CostAware, EvictionPolicy, PrefixCache, PriorityTTL, SegmentedLRU
from radixkv.testing import FakeLeaf, PrefixCacheAdapter, cache_machine, policy_machine

TestLRU = policy_machine(LRU, goes_before=lambda a, b: a.last_use < b.last_use, max_examples=25).TestCase
TestLFU = policy_machine(LFU, max_examples=25).TestCase
TestSegmentedLRU = policy_machine(SegmentedLRU, max_examples=25).TestCase
TestPriority = policy_machine(
    lambda: PriorityTTL(None),
    goes_before=lambda a, b: (a.priority, a.last_use) < (b.priority, b.last_use),
    max_examples=25,
).TestCase
TestPriorityTTL = policy_machine(PriorityTTL, max_examples=25).TestCase
TestCostAware = policy_machine(CostAware, max_examples=25).TestCase
TestAdaptive = policy_machine(Adaptive, max_examples=25).TestCase

# The simplest policy and the one with the most state find most bugs; `make quick` runs these two only.
for _machine in (TestLFU, TestSegmentedLRU, TestPriority, TestPriorityTTL, TestCostAware):
    pytest.mark.slow(_machine)
del _machine  # or pytest collects the last one twice


@pytest.mark.parametrize("policy", [LFU, SegmentedLRU, PriorityTTL, CostAware, Adaptive])
def test_the_cache_keeps_its_rules_under_every_policy(policy: type[EvictionPolicy]) -> None:
    cache_machine(lambda n, size: PrefixCacheAdapter(n, size, policy()), max_examples=20).TestCase().runTest()


def test_of_equal_age_the_first_to_come_goes_first() -> None:
    policy = LRU()
    leaves = [FakeLeaf(5, 1), FakeLeaf(5, 1), FakeLeaf(3, 1), FakeLeaf(3, 1)]
    for leaf in leaves:
        policy.add(leaf)
    order = []
    while policy.leaves():
        order.append(policy.next_leaf())
        policy.remove(order[-1])
    assert order == [leaves[2], leaves[3], leaves[0], leaves[1]]


def test_entries_of_leaves_that_came_back_to_use_do_not_pile_up() -> None:
    policy = LRU()
    policy.add(FakeLeaf(10**9, 1))
    old = FakeLeaf(0, 1)
    for _ in range(10_000):
        policy.add(old)
        policy.remove(old)
    assert len(policy._late._heap) <= 65 + 2


def test_a_used_leaf_is_evicted_later() -> None:
    cache = PrefixCache(6, 2)
    for first in (1, 2, 3):
        leave(cache, [first] * 4)
    cache.abort(cache.open([1] * 5))  # a use, though nothing was computed
    assert cache.match([2] * 4) == 4  # a match is not a use
    press(cache, 2)
    assert [cache.match([first] * 4) for first in (1, 2, 3)] == [4, 0, 4]


def test_a_parent_goes_by_its_own_last_use() -> None:
    cache = PrefixCache(7, 1)
    leave(cache, [1, 2, 3])
    leave(cache, [1, 2, 4])
    leave(cache, [5, 6, 7])
    press(cache, 3)  # 3, 4, then 2 of their parent; the other prompt, which is younger, loses nothing yet
    assert [cache.match(prompt) for prompt in ([1, 2, 3], [5, 6, 7])] == [1, 3]
    press(cache, 4)
    assert [cache.match(prompt) for prompt in ([1, 2, 3], [5, 6, 7])] == [0, 3]


def test_several_leaves_and_the_tail_of_one_go_at_once_and_are_counted() -> None:
    cache = PrefixCache(9, 4)
    leave(cache, [1] * 4)
    leave(cache, [2] * 6)
    leave(cache, [3] * 22)
    press(cache, 5)
    assert [cache.match([t] * 22) for t in (1, 2, 3)] == [0, 0, 16]
    assert (cache.stats.evicted_blocks, cache.stats.evicted_tokens) == (5, 4 + 6 + 6)
    press(cache, 9)
    assert (cache.stats.evicted_blocks, cache.stats.evicted_tokens) == (9, 4 + 6 + 22)


def test_the_block_to_copy_from_can_be_the_one_that_goes() -> None:
    cache = PrefixCache(3, 2)
    leave(cache, [1, 1, 2, 2, 3, 3])
    table = cache.open([1, 1, 2, 2, 3, 9])
    assert table.num_cached_tokens == 5
    assert cache.drain_copies() == []  # the copy takes the place of its source, so nothing is copied
    assert cache.match([1, 1, 2, 2, 3, 3]) == 4
    cache.check()


@pytest.mark.parametrize("namespace", ["a", "b"])
def test_namespaces_are_evicted_by_age_alone(namespace: str) -> None:
    cache = PrefixCache(4, 1)
    leave(cache, [1, 2], namespace="a")
    leave(cache, [1, 2], namespace="b")
    cache.abort(cache.open([1, 2, 3], namespace))
    press(cache, 2)
    other = "b" if namespace == "a" else "a"
    assert (cache.match([1, 2], namespace), cache.match([1, 2], other)) == (2, 0)
