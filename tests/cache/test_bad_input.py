"""What the cache cannot accept is refused with a named error, and changes nothing."""

from __future__ import annotations

import math
import re
import time
from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cache_driver import compute, leave

from radixkv.cache import (
    LRU,
    POLICIES,
    Adaptive,
    BlockPool,
    ClosedError,
    CostAware,
    EventLog,
    EvictableLeaf,
    InvalidArgumentError,
    PrefixCache,
    PriorityTTL,
    SegmentedLRU,
    block_pool,
)
from radixkv.cache.observer import TreeObserver

IMPOSSIBLE_TOKENS = [
    [-1],
    [2**31],
    [5] * 100 + [-1],
    [5, 10**30],
    [5, None],
    ["a"],
    [1.5],
    "text",
    b"bytes",
    bytearray(b"more"),
    {1, 2},
    pytest.param(iter([1, 2]), id="an iterator"),  # its repr contains its address, which differs from worker to worker
    None,
    7,
    np.zeros((2, 2), dtype=np.int32),
    np.array(3),
    np.array([1.0]),
    np.array([True]),
    np.array([-1]),
    np.array([2**31]),
    np.array([-1], dtype=np.int8),
    np.array([2**40], dtype=np.uint64),
]


@pytest.mark.parametrize("policy", ["lru", LRU, 5])
def test_a_policy_is_neither_a_name_nor_a_class(policy: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=r"policy: expected an eviction policy such as LRU\(\), got"):
        PrefixCache(8, policy=policy)


@pytest.mark.parametrize("kind", list(POLICIES.values()))
def test_a_policy_belongs_to_one_cache(kind: Any) -> None:
    policy = kind()
    first = PrefixCache(4, 4, policy=policy)
    with pytest.raises(
        InvalidArgumentError, match="policy: expected one for each cache, got one that is another cache's"
    ):
        PrefixCache(4, 4, policy=policy)
    leave(first, range(12))
    leave(first, range(100, 112))
    first.check()


class Bare:
    """A user's policy without `__weakref__`: nothing can note which cache it belongs to."""

    __slots__ = ()

    def add(self, leaf: EvictableLeaf) -> None:
        """Not called."""

    remove = add

    def next_leaf(self) -> EvictableLeaf:
        raise AssertionError

    def leaves(self) -> list[EvictableLeaf]:
        return []


class Slotted(Bare):
    """A user's policy that takes no attributes and has no hash."""

    __slots__ = ("__weakref__",)
    __hash__ = None  # type: ignore[assignment]


def test_a_policy_with_slots_belongs_to_one_cache_too() -> None:
    """Which cache a policy belongs to used to be noted in its attributes, so one with slots could be given to two caches."""
    policy = Slotted()
    PrefixCache(4, 4, policy)
    with pytest.raises(InvalidArgumentError, match=r"^policy: expected one for each cache"):
        PrefixCache(4, 4, policy)
    with pytest.raises(InvalidArgumentError, match=r"^policy: expected one with __weakref__ among .*, got Bare$"):
        PrefixCache(4, 4, Bare())


def test_there_are_no_more_blocks_than_memory_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidArgumentError, match=r"^num_blocks: expected at most 2,147,483,647, got 1000000000000$"):
        PrefixCache(10**12, 4)

    def array_of(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(block_pool, "array", array_of)
    with pytest.raises(
        MemoryError, match=r"^num_blocks: expected as many .*, got 1000: their counts take 4,000 bytes$"
    ):
        PrefixCache(1000, 4)


def test_events_are_a_log() -> None:
    with pytest.raises(InvalidArgumentError, match=r"events: expected an EventLog, got \[\]"):
        PrefixCache(8, events=[])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (SegmentedLRU, "protected_share"),
        (PriorityTTL, "ttl"),
        (CostAware, "double_depth"),
        (EventLog, "max_events"),
        (lambda limits: PrefixCache(8).limit_owners(limits), "limits"),
    ],
)
@pytest.mark.parametrize("value", ["x", True, [5]])
def test_what_is_no_number_is_refused_by_name(make: Any, name: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=rf"^{name}: expected .* got {re.escape(repr(value))}"):
        make(value)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: SegmentedLRU(1.5), "protected_share: expected a number between 0 and 1, got 1.5"),
        (lambda _: PriorityTTL(0), "ttl: expected seconds above 0 or None, got 0"),
        (lambda _: CostAware(0), "double_depth: expected blocks above 0, got 0"),
        (lambda cache: cache.open([1], priority="high"), "priority: expected a whole number, got 'high'"),
        (lambda _: PrefixCache(8, 4, clock=5), "clock: expected a function that returns seconds, got 5"),
        (
            lambda cache: cache.pin([1], ttl=10**400),
            "ttl: expected a finite number of seconds above 0, or None, got 1000",
        ),
        (
            lambda cache: cache.pin([1], ttl=math.inf),
            "ttl: expected a finite number of seconds above 0, or None, got inf",
        ),
        (lambda cache: cache.outline(5), "namespace: expected a string, got 5"),
        (lambda cache: cache.outline("", "x"), "max_nodes: expected a whole number of at least 0, got 'x'"),
        (lambda cache: cache.outline("", -1), "max_nodes: expected a whole number of at least 0, got -1"),
        (lambda cache: cache.continuation(cache.open([1]), [1], None), "max_tokens: expected a whole .*, got None"),
        (lambda cache: cache.continuation("x", [1], 3), "table: expected a BlockTable, got str"),
        (lambda cache: cache.remove_observer(TreeObserver()), "observer: expected one that was added, got <"),
        (lambda cache: cache.reserve_many([cache.open([1])], [-1]), "num_tokens: expected .* at least 0, got -1"),
        (lambda cache: cache.reserve_many([cache.open([1])] * 2, [0, 30]), "tables: expected distinct tables"),
        (lambda _: EventLog(10**30), "max_events: expected at most 9,223,372,036,854,775,807, got 1000"),
        (lambda _: EventLog().take(-1), "count: expected a whole number of at least 0, got -1"),
        (lambda _: EventLog().take("x"), "count: expected a whole number of at least 0, got 'x'"),
    ],
)
def test_what_is_out_of_range_is_refused_by_name(call: Callable[[PrefixCache], Any], message: str) -> None:
    cache = PrefixCache(8, 4)
    with pytest.raises(InvalidArgumentError, match=rf"^{message}"):
        call(cache)
    assert cache.num_free_blocks == 8
    cache.check()


def test_a_refused_clock_leaves_the_policy_free() -> None:
    policy = PriorityTTL()
    with pytest.raises(InvalidArgumentError, match="clock"):
        PrefixCache(8, 4, policy, clock=time)  # type: ignore[arg-type]
    PrefixCache(8, 4, policy)


def test_blocks_are_not_shared_with_fewer_owners_than_none() -> None:
    """A negative count used to subtract owners: a block had none left, yet the pool still counted it as taken."""
    pool = BlockPool(4)
    blocks = pool.allocate(2)
    for count in (-1, 1.5, None):
        with pytest.raises(InvalidArgumentError, match=r"^count: expected a whole number of at least 0, got "):
            pool.share(blocks, count)  # type: ignore[arg-type]
    assert pool.ref_counts.tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("tokens", IMPOSSIBLE_TOKENS, ids=repr)
def test_impossible_tokens_are_refused_and_change_nothing(tokens: Any) -> None:
    cache = PrefixCache(8, 2)
    table = compute(cache, [1, 2, 3])
    cache.reserve(table, 8)
    before = repr(cache.tree_snapshot()), cache.stats, cache.num_free_blocks, table.tokens.tolist(), table.num_blocks
    for call in (cache.open, cache.demand, cache.match, cache.pin, lambda tokens: cache.append(table, tokens)):
        with pytest.raises(InvalidArgumentError, match=r"^tokens: expected .*, got ") as refusal:
            call(tokens)
        if isinstance(tokens, list):
            assert str(refusal.value).endswith(f" {tokens[-1]!r}")
    after = repr(cache.tree_snapshot()), cache.stats, cache.num_free_blocks, table.tokens.tolist(), table.num_blocks
    assert after == before
    cache.check()


@pytest.mark.parametrize("cleared", [False, True])
@pytest.mark.parametrize("tokens", IMPOSSIBLE_TOKENS, ids=repr)
def test_only_tokens_have_a_continuation(tokens: Any, cleared: bool) -> None:
    """After `clear`, anything had none; before, what cannot be sliced ended in a TypeError."""
    cache = PrefixCache(8, 2)
    table = cache.open([5])
    if cleared:
        cache.clear()
    with pytest.raises(InvalidArgumentError, match=r"^tokens: expected .*, got "):
        cache.continuation(table, tokens, 1)


def test_an_empty_prompt_can_be_looked_up_but_not_opened() -> None:
    cache = PrefixCache(8, 2)
    leave(cache, [1, 2, 3])
    assert cache.match([]) == cache.match(np.array([], dtype=np.int64)) == 0
    assert cache.pin([]).num_tokens == 0
    for call in (cache.open, cache.demand):
        with pytest.raises(InvalidArgumentError, match="at least one"):
            call([])


@pytest.mark.parametrize(
    "tokens",
    [
        (1, 2, 300),
        array("i", [1, 2, 300]),
        range(1, 4),
        *(np.array([1, 2, 3], dtype=t) for t in ("u1", "i8", ">i4", "u8")),
    ],
    ids=repr,
)
def test_tokens_come_in_many_forms(tokens: Any) -> None:
    cache = PrefixCache(8, 2)
    leave(cache, list(map(int, tokens)))
    assert cache.match(tokens) == 3
    assert cache.match(np.repeat(np.array(list(tokens)), 2)[::2]) == 3
    assert cache.open([*map(int, tokens), 5]).tokens.tolist() == list(tokens)


@pytest.mark.parametrize("token", [0, 2**31 - 1])
def test_the_first_and_last_token_ids_are_tokens(token: int) -> None:
    cache = PrefixCache(8, 2)
    leave(cache, [token] * 3)
    assert cache.match([token] * 3) == 3


@pytest.mark.parametrize("size", [0, -1, 1.5, True, "4"])
def test_impossible_sizes_are_refused(size: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_blocks"):
        PrefixCache(size)
    with pytest.raises(InvalidArgumentError, match="block_size"):
        PrefixCache(4, size)


def test_tables_are_refused_once_closed_and_by_other_caches() -> None:
    cache, other = PrefixCache(4, 2), PrefixCache(4, 2)
    table = cache.open([1, 2, 3])
    calls = [
        lambda c: c.reserve(table, 1),
        lambda c: c.append(table, [1]),
        lambda c: c.fork(table),
        lambda c: c.continuation(table, [1, 2, 3], 4),
        lambda c: c.close(table),
        lambda c: c.abort(table),
    ]
    for call in calls:
        with pytest.raises(ClosedError, match="another cache"):
            call(other)
    with pytest.raises(InvalidArgumentError, match="reserved"):
        cache.append(table, [1])
    for count in (0, -1, True, 1.5, "2"):
        with pytest.raises(InvalidArgumentError, match="count: expected a whole number of at least 1"):
            cache.fork(table, count)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="num_tokens"):
        cache.reserve(table, -1)
    with pytest.raises(InvalidArgumentError, match="namespace"):
        cache.open([1], namespace=None)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="namespace: character 1 is half of a surrogate pair"):
        cache.open([1], namespace="a\ud83d")
    with pytest.raises(InvalidArgumentError, match="BlockTable"):
        cache.close("table")  # type: ignore[arg-type]
    cache.close(table)
    for call in calls:
        with pytest.raises(ClosedError, match="closed"):
            call(cache)
    with pytest.raises(InvalidArgumentError, match=r"^pin: expected a Pin, got BlockTable$"):
        cache.release(table)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="namespace"):
        cache.clear(5)  # type: ignore[arg-type]
    with pytest.raises(ClosedError, match="closed"):
        cache.reserve_many([table], [4])
    pin = other.pin([1])
    other.release(pin)
    leave(cache, [1, 2, 3])
    with pytest.raises(ClosedError, match=r"^pin: it belongs to another cache$"):
        other.release(cache.pin([1, 2]))


def test_an_observer_that_is_none_is_named_and_leaves_the_policy_free() -> None:
    policy = LRU()
    with pytest.raises(InvalidArgumentError, match=r"^observers: expected a sequence"):
        PrefixCache(4, 4, policy, observers=3)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=r"^observers\[0\]: expected a TreeObserver"):
        PrefixCache(4, 4, policy, observers=["no"])  # type: ignore[list-item]
    cache = PrefixCache(4, 4, policy)
    with pytest.raises(InvalidArgumentError, match=r"^observer: expected a TreeObserver"):
        cache.add_observer(None)  # type: ignore[arg-type]


def test_the_policy_stays_an_observer() -> None:
    """It could be removed, and learned nothing from then on."""
    policy = Adaptive()
    cache = PrefixCache(4, 1, policy)
    with pytest.raises(InvalidArgumentError, match=r"^observer: expected a TreeObserver, got <.*Adaptive"):
        cache.remove_observer(policy)  # type: ignore[arg-type]


def test_what_cannot_be_a_table_has_no_slots() -> None:
    with pytest.raises(InvalidArgumentError, match=r"^tables: expected BlockTables, got \[\[\]\]$"):
        PrefixCache(4, 1).reserve_many([[]], [1])  # type: ignore[list-item]


def test_booleans_are_no_numbers_of_a_pin_or_a_priority() -> None:
    cache = PrefixCache(4, 1)
    with pytest.raises(InvalidArgumentError, match=r"^ttl: "):
        cache.pin([1], ttl=True)
    with pytest.raises(InvalidArgumentError, match=r"^priority: "):
        cache.open([1], priority=True)
    leave(cache, [1])
    assert cache.pin([1], ttl=np.int64(5)).num_tokens == 1
