"""A copy of a cache goes on as the original does, and has nothing in common with it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from support.cache_driver import compute, leave, leave_unchecked

from radixkv.cache import LRU, POLICIES, EventLog, InvalidArgumentError, PrefixCache


class Ticks:
    """A clock whose copies continue as the original does."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        self._now += 1.0
        return self._now


@pytest.mark.parametrize("how", [deepcopy, lambda both: pickle.loads(pickle.dumps(both))])
@pytest.mark.parametrize("policy", POLICIES.values())
def test_a_copy_goes_on_as_its_original_does(how: Callable[[Any], Any], policy: Callable[[], Any]) -> None:
    """A copied pool used to count owners in one array and read them in another, so blocks with two owners were written."""
    original = PrefixCache(12, 4, policy(), events=EventLog(), clock=Ticks())
    for token in range(6):
        leave(original, [token, 1, 2, 3, 4, 5])
    begun = compute(original, [9, 9, 9])
    lives = []
    for cache, table in (how((original, begun)), (original, begun)):
        (twin,) = cache.fork(table)
        cache.reserve(twin, 4)
        cache.append(twin, [8])
        cache.check()
        for token in range(10, 16):
            leave(cache, [token, 1, 2, 3, 4, 5])
        lives.append((twin.block_ids.tolist(), cache.ref_counts().tolist(), cache.stats, list(cache.events)))
        with pytest.raises(InvalidArgumentError, match="another cache's"):
            PrefixCache(12, 4, cache._tree.policy)
    assert lives[0] == lives[1]


@pytest.mark.parametrize("how", [deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
@pytest.mark.parametrize("policy", POLICIES.values())
def test_a_cache_of_any_depth_can_be_copied(how: Callable[[Any], Any], policy: Callable[[], Any]) -> None:
    """From about a hundred nodes below each other on, copying nodes with their children went deeper than Python's stack."""
    original = PrefixCache(1000, 1, policy())
    for depth in range(200):
        leave_unchecked(original, [0] * depth + [1])
    copied = how(original)
    copied.check()
    assert sorted(copied.block_hashes()) == sorted(original.block_hashes())


@pytest.mark.parametrize("how", [deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))])
def test_a_copy_s_policy_is_its_own_when_owners_are_limited(how: Callable[[Any], Any]) -> None:
    """What stands in front of the policy was registered in its place, so that another cache accepted it."""
    original = PrefixCache(8, 2, LRU())
    original.limit_owners({"a": 1})
    copied = how(original)
    copied.limit_owners({})
    with pytest.raises(InvalidArgumentError, match="another cache's"):
        PrefixCache(8, 2, copied._tree.policy)
