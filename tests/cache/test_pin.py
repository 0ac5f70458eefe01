"""Pinned prefixes stay, within a quota, for their time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support.cache_driver import leave

from radixkv.cache import (
    LRU,
    Adaptive,
    EvictionPolicy,
    InvalidArgumentError,
    OutOfBlocks,
    Pin,
    PinQuotaExceeded,
    PrefixCache,
    PriorityTTL,
)
from radixkv.cache import pin as pin_module
from radixkv.cache.node import Node


def test_a_pin_expires_and_its_blocks_can_be_had() -> None:
    now = [0.0]
    cache = PrefixCache(4, 2, clock=lambda: now[0])
    leave(cache, [1, 1, 2, 2])
    pin = cache.pin([1, 1, 2, 2], ttl=5)
    assert pin.expires_at == 5
    assert cache.pins() == [pin]
    table = cache.open([9], write=False)
    with pytest.raises(OutOfBlocks):
        cache.reserve(table, 8)
    now[0] = 5.0
    cache.reserve(table, 8)
    assert (pin.released, cache.pins(), cache.match([1, 1])) == (True, [], 0)
    cache.check()


@pytest.mark.parametrize("policy", [LRU, lambda: PriorityTTL(10), Adaptive])
@pytest.mark.parametrize("expires", [False, True])
def test_the_end_of_a_pin_is_no_use(policy: Callable[[], EvictionPolicy], expires: bool) -> None:
    """What it had kept became the last to be evicted, and kept its priority for another time to live."""
    now = [0.0]
    cache = PrefixCache(6, 1, policy(), clock=lambda: now[0])
    leave(cache, [1, 1], priority=5)
    pin = cache.pin([1, 1], ttl=100 if expires else None)
    for now[0], token in ((50.0, 2), (199.0, 3)):
        leave(cache, [token, token])
    if not expires:
        cache.release(pin)
    now[0] = 200.0
    leave(cache, [4, 4])
    assert [cache.match([token, token]) for token in (1, 2, 3, 4)] == [0, 2, 2, 2]


@pytest.mark.parametrize(
    ("query", "pinned", "expired"),
    [
        (lambda cache: cache.num_evictable_blocks, 0, 2),
        (lambda cache: cache.num_available_blocks, 2, 4),
        (lambda cache: cache.ref_counts().sum(), 4, 2),
        (lambda cache: cache.demand([1, 1, 2, 2, 4]).num_blocks, 1, 3),
        (lambda cache: cache.tree_snapshot()[""].children[0].lock_count, 1, 0),
        (lambda cache: cache.outline("").children[0].lock_count, 1, 0),
    ],
)
def test_an_expired_pin_counts_nowhere_as_in_use(
    query: Callable[[PrefixCache], int], pinned: int, expired: int
) -> None:
    """Until an allocation failed for it, its blocks counted as in use: what counted them first did not try one."""
    now = [0.0]
    cache = PrefixCache(4, 2, clock=lambda: now[0])
    leave(cache, [1, 1, 2, 2])
    cache.pin([1, 1, 2, 2], ttl=9)
    cache.release(cache.pin([1, 1], ttl=5))
    assert query(cache) == pinned
    now[0] = 5.0
    assert query(cache) == pinned
    now[0] = 9.0
    assert query(cache) == expired
    cache.check()


@pytest.mark.parametrize("end", [lambda cache, pin: cache.release(pin), lambda cache, _: cache.clear()])
def test_a_pin_that_is_gone_does_not_expire(end: Callable[[PrefixCache, Pin], None]) -> None:
    """Whoever waits until the next one does woke for it."""
    cache = PrefixCache(4, 1, clock=lambda: 0.0)
    leave(cache, [1, 2])
    first, second = cache.pin([1], ttl=5), cache.pin([1, 2], ttl=7)
    assert cache.seconds_until_pins_expire == 5
    cache.release(first)
    assert cache.seconds_until_pins_expire == 7
    end(cache, second)
    assert cache.seconds_until_pins_expire == math.inf


def test_the_quota_counts_shared_blocks_once() -> None:
    cache = PrefixCache(8, 1, max_pinned_blocks=4)
    for last in (4, 5, 6):
        leave(cache, [1, 2, last])
    first, second = cache.pin([1, 2, 4]), cache.pin([1, 2, 5])
    with pytest.raises(PinQuotaExceeded, match="5 blocks would be pinned, 4 may be: unpin others") as caught:
        cache.pin([1, 2, 6])
    assert (caught.value.needed, caught.value.quota) == (5, 4)
    cache.pin([1, 2])
    assert len(cache.pins()) == 3
    cache.release(first)
    cache.release(second)
    assert cache.pin([1, 2, 6]).num_tokens == 3
    cache.check()


@pytest.mark.parametrize(
    "tokens", [[1, 2, 4, 8], [1, 2, 3, 7, 5], [1, 2, 3, 4, 5], [9, 9, 9], [9, 9, 9, 9, 9], [1], []]
)
def test_what_may_be_pinned_is_known_before_it_is_computed(tokens: list[int]) -> None:
    cache = PrefixCache(20, 2, max_pinned_blocks=4)
    leave(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    leave(cache, [9, 9])
    cache.pin([1, 2, 3, 4])
    before = repr(cache.tree_snapshot()), cache.stats, cache.pins()
    refusal = None
    try:
        cache.check_pin(tokens)
    except PinQuotaExceeded as error:
        refusal = error
    assert (repr(cache.tree_snapshot()), cache.stats, cache.pins()) == before
    if tokens:
        leave(cache, tokens)
    if refusal is None:
        assert cache.pin(tokens).num_tokens == len(tokens) // 2 * 2
    else:
        with pytest.raises(PinQuotaExceeded) as caught:
            cache.pin(tokens)
        assert str(caught.value) == str(refusal)


@pytest.mark.parametrize("ttl", [0, -1, "soon"])
def test_impossible_times_are_refused(ttl: object) -> None:
    cache = PrefixCache(4, 2)
    for call in (cache.pin, cache.check_pin):
        with pytest.raises(InvalidArgumentError, match="ttl"):
            call([1], ttl=ttl)  # type: ignore[operator]


def test_a_pin_says_what_it_is() -> None:
    cache = PrefixCache(4, 2, clock=lambda: 0.0)
    leave(cache, [1, 1])
    assert repr(cache.pin([1, 1])) == "Pin(2 tokens, until released)"
    assert repr(cache.pin([1, 1], ttl=5)) == "Pin(2 tokens, until it expires)"
    assert repr(cache.pin([7])) == "Pin(0 tokens, released)"


def test_pinned_blocks_are_those_of_all_pins_however_they_share_and_end() -> None:
    """They are counted as pins begin and end, while nodes are split and continued."""
    chance = random.Random(0)
    now = [0.0]
    cache = PrefixCache(400, 2, max_pinned_blocks=400, clock=lambda: now[0])
    for step in range(600):
        now[0] += 1
        tokens = [chance.randrange(2) for _ in range(2 * chance.randrange(1, 9))]
        match chance.randrange(6):
            case 0:
                leave(cache, tokens)
            case 1 | 2:
                cache.pin(tokens, ttl=chance.choice([None, 5, 50]))
            case 3 if pins := cache.pins():
                cache.release(chance.choice(pins))
            case 4 if step % 50 == 0:
                cache.clear()
        cache.check()


@pytest.mark.parametrize("end", ["expire", "are released"])
def test_pins_that_end_in_order_are_not_compared_with_each_other(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those left, the first to expire was searched anew for each: 10,000 took two seconds."""
    num_reads = 0

    class Counted(Pin):
        def __getattribute__(self, name: str) -> Any:
            nonlocal num_reads
            num_reads += name == "expires_at"
            return super().__getattribute__(name)

    monkeypatch.setattr(pin_module, "Pin", Counted)
    each = []
    for count in (20, 40):
        now = [0.0]
        cache = PrefixCache(200, 2, clock=lambda now=now: now[0])  # type: ignore[misc]
        pins = []
        for number in range(count):
            leave(cache, [number] * 4)
            pins.append(cache.pin([number] * 4, ttl=5 + number))
        num_reads = 0
        if end == "expire":
            now[0] = 100.0
        else:
            for pin in pins:
                cache.release(pin)
        assert cache.pins() == []
        each.append(num_reads / count)
    assert each[1] <= each[0]


def test_a_pin_is_added_and_released_without_looking_at_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of all pins were counted for each."""
    num_paths = 0
    path = Node.path

    def counted(node: Node) -> Iterator[Node]:
        nonlocal num_paths
        num_paths += 1
        return path(node)

    monkeypatch.setattr(Node, "path", counted)
    each = []
    for count in (20, 40):
        cache = PrefixCache(200, 2)
        for number in range(count):
            leave(cache, [number] * 4)
        num_paths = 0
        for pin in [cache.pin([number] * 4) for number in range(count)]:
            cache.release(pin)
        each.append(num_paths / count)
    assert each[0] == each[1]
