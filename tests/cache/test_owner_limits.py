"""What an owner has cached beyond its limit is evicted first, and no more than that."""

from __future__ import annotations

import itertools
from unittest.mock import Mock

import pytest
from support.cache_driver import compute, leave

from radixkv.cache import POLICIES, InvalidArgumentError, PrefixCache
from radixkv.cache.eviction.lru import LRU

SIZE = 4
_numbers = itertools.count()


def serve(cache: PrefixCache, num_blocks: int, owner: str = "") -> list[int]:
    """Serve a prompt that shares nothing with any other, from start to end."""
    number = 1000 * next(_numbers)
    prompt = list(range(number, number + num_blocks * SIZE))
    leave(cache, prompt, owner=owner)
    return prompt


def cached_blocks(cache: PrefixCache, prompts: list[list[int]]) -> list[int]:
    return [cache.match(prompt) // SIZE for prompt in prompts]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_flood_evicts_its_own_and_not_the_others(policy: str) -> None:
    cache = PrefixCache(40, SIZE, POLICIES[policy]())
    cache.limit_owners({"bulk": 10})
    others = [serve(cache, 5, "ann"), serve(cache, 5, "bob")]
    for _ in range(50):
        serve(cache, 6, "bulk")
    assert cached_blocks(cache, others) == [5, 5]
    assert cache.num_free_blocks == 0  # it may use what nobody else needs


def test_no_more_than_what_is_beyond_is_taken() -> None:
    cache = PrefixCache(20, SIZE)
    oldest = serve(cache, 8, "ann")
    bulk = serve(cache, 12, "bulk")
    cache.limit_owners({"bulk": 10})
    serve(cache, 5, "cas")
    assert cached_blocks(cache, [bulk, oldest]) == [10, 5]


def test_the_owner_furthest_beyond_its_limit_is_evicted_first() -> None:
    cache = PrefixCache(20, SIZE)
    a, b = serve(cache, 9, "a"), serve(cache, 11, "b")
    cache.limit_owners({"a": 8, "b": 5})
    serve(cache, 4)
    assert cached_blocks(cache, [a, b]) == [9, 7]


def test_what_is_in_use_counts_and_is_not_evicted() -> None:
    cache = PrefixCache(20, SIZE)
    cache.limit_owners({"bulk": 4})
    table = compute(cache, [7] * 10 * SIZE, owner="bulk")
    idle, oldest = serve(cache, 3, "bulk"), serve(cache, 7, "ann")
    serve(cache, 5, "cas")
    assert cached_blocks(cache, [idle, oldest]) == [0, 5]
    assert table.num_blocks == 10
    cache.close(table)
    cache.check()


def test_blocks_are_of_the_owner_that_computed_them_whoever_goes_on() -> None:
    cache = PrefixCache(20, SIZE)
    cache.limit_owners({"ann": 0})
    stem = serve(cache, 4, "ann")
    # What bob computes is bob's, whether it lies below ann's leaf or takes its place.
    longer = [*stem, *range(5 * SIZE), 3]
    table = compute(cache, longer, owner="bob")
    assert table.num_cached_tokens == len(stem)
    (fork,) = cache.fork(table)
    cache.close(table)
    cache.close(fork)
    cache.check()
    serve(cache, 4, "ann")
    serve(cache, 9, "cas")
    assert cache.match(longer) == len(longer)  # it must be evicted before its parent, which is ann's
    cache.limit_owners({"bob": 0})
    serve(cache, 3, "cas")
    assert len(stem) <= cache.match(longer) < len(longer)


def test_limits_are_replaced_and_withdrawn() -> None:
    cache = PrefixCache(20, SIZE)
    kept = serve(cache, 10, "a")
    for limits in ({"a": 3}, {"b": 2}, {"b": 0, "a": 10}):
        cache.limit_owners(limits)
        cache.check()
        assert len(cache._tree.observers.on_insert) == 1
    cache.limit_owners({})
    assert not cache._tree.observers.on_insert
    other = serve(cache, 10, "b")
    serve(cache, 4, "c")
    assert cached_blocks(cache, [kept, other]) == [6, 10]


def test_limits_that_cannot_be_set_leave_those_before_in_force(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those before were no longer told what is cached, and limited by what had been."""
    cache = PrefixCache(20, SIZE)
    cache.limit_owners({"a": 2})
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(LRU, "leaves", Mock(side_effect=MemoryError))
        cache.limit_owners({"a": 1})
    serve(cache, 4, "a")
    cache.check()


@pytest.mark.parametrize("limit", [-1, 2.5, True, None])
def test_an_impossible_limit_is_refused_and_nothing_changes(limit: object) -> None:
    cache = PrefixCache(20, SIZE)
    cache.limit_owners({"a": 3})
    limited = cache._tree.owner_limits
    with pytest.raises(InvalidArgumentError, match=r"limits\['b'\]: expected a whole number of at least 0"):
        cache.limit_owners({"a": 1, "b": limit})  # type: ignore[dict-item]
    assert cache._tree.owner_limits is limited
    with pytest.raises(InvalidArgumentError, match="owners as strings, got 5"):
        cache.limit_owners({5: 1})  # type: ignore[dict-item]
    with pytest.raises(InvalidArgumentError, match="owner: expected a string, got 5"):
        cache.open([1], owner=5)  # type: ignore[arg-type]
