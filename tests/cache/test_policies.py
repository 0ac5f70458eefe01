"""What each eviction policy keeps, and what the adaptive one learns."""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.cache_driver import compute, leave, press

from radixkv.cache import (
    LFU,
    LRU,
    Adaptive,
    CostAware,
    EvictableLeaf,
    EvictionPolicy,
    OutOfBlocks,
    PrefixCache,
    PriorityTTL,
    Reason,
    SegmentedLRU,
)
from radixkv.cache.eviction.reuse_times import AGE_BORDERS
from radixkv.testing import FakeLeaf


def test_priorities_hold_for_their_time() -> None:
    now = [0.0]
    cache = PrefixCache(4, 1, PriorityTTL(10), clock=lambda: now[0])
    leave(cache, [1], priority=5)
    now[0] = 1.0
    for token in (2, 3, 4, 5):
        leave(cache, [token])
    assert [cache.match([token]) for token in (1, 2, 3)] == [1, 0, 1]
    now[0] = 11.5
    leave(cache, [6])
    assert [cache.match([token]) for token in (1, 3)] == [0, 1]


def test_a_partly_filled_block_has_its_sequences_priority() -> None:
    cache = PrefixCache(3, 2, PriorityTTL(None))
    leave(cache, [1], priority=1)
    leave(cache, [2])
    leave(cache, [3])
    leave(cache, [4])
    assert [cache.match([token]) for token in (1, 2)] == [1, 0]


@pytest.mark.parametrize("num_continuations", [0, 1])
@pytest.mark.parametrize("tail", [[2, 2, 2, 2], [2, 2, 2]])
def test_what_continues_a_prefix_of_higher_priority_has_its_own(num_continuations: int, tail: list[int]) -> None:
    """It was kept like that prefix where it was the first to continue it."""
    cache = PrefixCache(6, 2, PriorityTTL(None))
    for last in range(num_continuations):
        leave(cache, [1, 1, last, last], priority=5)
    leave(cache, [1, 1], priority=5)
    leave(cache, [1, 1, *tail], priority=0)
    leave(cache, [3, 3, 3, 3], priority=3)
    press(cache, cache.num_free_blocks + 2)
    assert [cache.match([1, 1, *tail]), cache.match([3, 3, 3, 3])] == [2, 4]


def test_a_chat_that_goes_on_at_a_higher_priority_stays_one_node() -> None:
    cache = PrefixCache(6, 1)
    for priority, chat in enumerate(([1], [1, 2], [1, 2, 3])):
        leave(cache, chat, priority=priority)
    (node,) = cache.tree_snapshot()[""].children
    assert node.tokens.tolist() == [1, 2, 3]


def test_the_first_part_of_what_prompts_divide_has_been_used_by_all_of_them() -> None:
    cache = PrefixCache(8, 1, PriorityTTL(None))
    for _ in range(2):
        leave(cache, [1, 1, 2, 2], priority=5)
    leave(cache, [4], priority=5)
    leave(cache, [1, 1, 3], priority=0)
    (node,) = (node for node in cache.tree_snapshot()[""].children if node.tokens[0] == 1)
    assert (node.tokens.tolist(), node.uses) == ([1, 1], 3)
    press(cache, cache.num_free_blocks + 4)
    assert (cache.match([4]), cache.match([1, 1])) == (0, 2)


def test_priorities_below_zero_go_before_all_others() -> None:
    cache = PrefixCache(3, 2, PriorityTTL(None))
    leave(cache, [1, 1])
    leave(cache, [2, 2], priority=-1)
    cache.release(cache.pin([2, 2]))  # a pin does not raise it
    leave(cache, [3], priority=-2)
    assert [cache.match([token]) for token in (1, 2, 3)] == [1, 1, 1]
    for expected in ([1, 1, 0], [1, 0, 0], [0, 0, 0]):
        press(cache, expected.count(0))
        assert [cache.match([token]) for token in (1, 2, 3)] == expected


@given(leaves=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 30), st.integers(1, 5), st.booleans()), max_size=40))
def test_scores_are_uses_by_cost_on_top_of_the_last_that_went(leaves: list[tuple[int, int, int, bool]]) -> None:
    for policy, costs in (
        (LFU(), lambda depth, num_blocks: 1),
        (CostAware(10), lambda depth, num_blocks: 1 + (depth + num_blocks) / 10),
    ):
        scores: dict[EvictableLeaf, float] = {}
        age = 0.0
        for time, (uses, depth, num_blocks, goes) in enumerate(leaves):
            leaf = FakeLeaf(time, num_blocks, uses=uses, depth=depth)
            policy.add(leaf)
            scores[leaf] = age + uses * costs(depth, num_blocks)
            if goes:
                first = policy.next_leaf()
                age = scores.pop(first)
                assert age <= min(scores.values(), default=age)
                policy.remove(first)
        assert set(policy.leaves()) == set(scores)


@given(steps=st.lists(st.tuples(st.integers(1, 2), st.booleans()), max_size=40), share=st.sampled_from([0.3, 0.5, 0.9]))
def test_segmented_lru_has_the_oldest_of_too_many_protected_step_back(
    steps: list[tuple[int, bool]], share: float
) -> None:
    policy = SegmentedLRU(share)
    probation: list[FakeLeaf] = []
    protected: list[FakeLeaf] = []
    for time, (uses, goes) in enumerate(steps):
        leaf = FakeLeaf(time, 1, uses=uses)
        policy.add(leaf)
        (protected if uses > 1 else probation).append(leaf)
        while len(protected) > max(1, share * (len(probation) + len(protected))):
            probation.append(protected.pop(0))
        probation.sort(key=lambda leaf: leaf.last_use)
        if goes:
            first = policy.next_leaf()
            assert first is (probation or protected).pop(0)
            policy.remove(first)
    assert set(policy.leaves()) == {*probation, *protected}


def num_hits(policy: EvictionPolicy, seconds_between: float) -> int:
    """Hits of ten prompts that keep returning among others that never do; LRU evicts each of the ten before it returns."""
    now, hits = [0.0], 0
    cache = PrefixCache(20, 1, policy, clock=lambda: now[0])
    new = itertools.count(1000)
    for _ in range(60):
        for token in range(10):
            now[0] += seconds_between
            hits += cache.match([token])
            leave(cache, [token])
            for _ in range(3):
                leave(cache, [next(new)])
    cache.check()
    return hits


@pytest.mark.parametrize(
    "seconds_between", [pytest.param(0.01, marks=pytest.mark.slow), 1, pytest.param(600, marks=pytest.mark.slow)]
)
def test_adaptive_learns_what_returns_at_any_pace(seconds_between: float) -> None:
    assert num_hits(LRU(), seconds_between) == 0
    assert num_hits(Adaptive(), seconds_between) > 450


@given(uses=st.integers(1, 300), parent_uses=st.integers(1, 9), num_blocks=st.integers(1, 80), depth=st.integers(0, 80))
def test_adaptive_groups_by_logarithms(uses: int, parent_uses: int, num_blocks: int, depth: int) -> None:
    leaf = FakeLeaf(1, num_blocks, uses=uses, parent_uses=parent_uses, depth=depth)
    Adaptive().on_idle(leaf)
    group = 0
    levels = (
        ([1, 2, 4, 8, 16, 32, 64, 128], uses),
        ([1, 2, 4], parent_uses),
        ([1, 3, 9, 33], num_blocks),
        ([0, 4], depth),
    )
    for least, value in levels:
        group = group * len(least) + bisect_right(least, value) - 1
    assert leaf.group == group


def test_adaptive_costs_a_bounded_number_of_refits() -> None:
    policy = Adaptive()
    calls = []
    fit = policy._refit
    policy._refit = lambda: (calls.append(1), fit())[1]  # type: ignore[method-assign]
    for _ in range(5000):
        policy.on_idle(FakeLeaf(1, 1))
    assert 10 < len(calls) < 60


@given(seed=st.integers(0, 2**32), steps=st.lists(st.tuples(st.integers(0, 40), st.booleans()), max_size=60))
def test_adaptive_finds_the_lowest_density_among_all_oldest_and_newest(
    seed: int, steps: list[tuple[int, bool]]
) -> None:
    random = np.random.default_rng(seed)
    policy = Adaptive()
    margin = policy._margin = float(random.choice([1.0, 1.75]))
    policy._refit_at = 10**9
    policy._densities = random.random((len(policy._queues), len(AGE_BORDERS))).tolist()
    leaves: dict[int, list[FakeLeaf]] = {}  # by group, oldest first
    now = 0.0
    for pause, comes in steps:
        now += pause / 8
        if comes:
            leaf = FakeLeaf(now, int(random.integers(1, 9)), uses=int(random.integers(1, 4)))
            policy.on_idle(leaf)
            policy.add(leaf)
            leaves.setdefault(leaf.group, []).append(leaf)
        policy._now = now

        def density(leaf: FakeLeaf, now: float = now) -> float:
            return policy._densities[leaf.group][bisect_left(AGE_BORDERS, now - leaf.last_use)]

        ends = [leaf for group in leaves.values() for leaf in (group[0], group[-1])]
        if not ends:
            continue
        found = policy.next_leaf()
        assert isinstance(found, FakeLeaf)
        assert found in ends
        oldest, lowest = min(ends, key=lambda leaf: leaf.last_use), min(map(density, ends))
        if density(oldest) <= margin * lowest:
            assert found.last_use == oldest.last_use
        else:
            assert density(found) == lowest
        if not comes:
            policy.remove(found)
            leaves[found.group].remove(found)
            if not leaves[found.group]:
                del leaves[found.group]


def test_what_is_computed_anew_keeps_its_uses_and_what_is_new_does_not() -> None:
    cache = PrefixCache(8, 1, Adaptive(), clock=lambda: 1.0)
    leave(cache, [1, 2, 3, 4])
    cache.abort(cache.open([1, 2, 3, 9]))
    press(cache, 8)
    assert cache.match([1, 2]) == 0
    table = cache.open([1, 2, 3, 4, 5, 6])
    for start, stop in ((0, 2), (2, 5), (5, 6)):  # in chunks, of which the second spans old and new
        cache.reserve(table, stop)
        cache.append(table, [1, 2, 3, 4, 5, 6][start:stop])
    cache.close(table)
    (often,) = cache.tree_snapshot()[""].children
    (once,) = often.children
    (new,) = once.children
    nodes = [(node.tokens.tolist(), node.uses) for node in (often, once, new)]
    assert nodes == [([1, 2, 3], 3), ([4], 2), ([5, 6], 1)]
    table = compute(cache, [1, 2, 3, 4, 5, 6, 7])
    cache.abort(table)
    cache.check()


def test_a_sequence_for_which_there_are_no_blocks_leaves_what_it_would_have_recalled() -> None:
    """What was remembered was lost when the sequence was opened: begun anew, it had no past, and was said to be new."""
    cache = PrefixCache(8, 1, Adaptive())
    leave(cache, [1, 2, 3, 4])
    press(cache, 8)
    other = compute(cache, [9] * 6, write=False)
    for _ in range(2):
        table = cache.open([1, 2, 3, 4])
        with pytest.raises(OutOfBlocks):
            cache.reserve(table, 4)
        cache.abort(table)
    assert [part.reason for part in cache.explain([1, 2, 3, 4]).computed] == [Reason.EVICTED]
    cache.close(other)
    leave(cache, [1, 2, 3, 4])
    assert cache.tree_snapshot()[""].children[0].uses == 2
    cache.check()


def test_a_leaf_whose_tail_is_evicted_and_computed_anew_is_one_node_again() -> None:
    cache = PrefixCache(8, 1, Adaptive(), clock=lambda: 1.0)
    leave(cache, [1, 2, 3, 4])
    press(cache, 6)
    assert cache.match([1, 2, 3, 4]) == 2
    leave(cache, [1, 2, 3, 4])
    (node,) = cache.tree_snapshot()[""].children
    assert (node.tokens.tolist(), node.uses) == ([1, 2, 3, 4], 2)
    cache.check()
