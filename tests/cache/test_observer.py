"""Observers are notified of every change, and of nothing that they do not override."""

from __future__ import annotations

import pytest
from support.cache_driver import compute, leave, press

from radixkv.cache import (
    LRU,
    AllCleared,
    BlocksRemoved,
    BlocksStored,
    EventLog,
    EvictableLeaf,
    InvalidArgumentError,
    PrefixCache,
)
from radixkv.cache.observer import TreeObserver, handlers


class Listening(LRU):
    """LRU that also takes the calls of a learning policy, and records them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def on_idle(self, node: EvictableLeaf) -> None:
        node.group = 7
        self.calls.append(("idle", node.num_blocks, node.last_use))

    def on_reuse(self, group: int, num_blocks: int, idle_since: float, now: float, evicted: bool) -> None:
        self.calls.append(("reuse", group, num_blocks, idle_since, now))

    def taken(self) -> list[tuple[object, ...]]:
        calls, self.calls = self.calls, []
        return calls


def make_cache(num_blocks: int = 8) -> tuple[PrefixCache, Listening, list[float]]:
    """A cache of blocks of two tokens, its policy, and its clock."""
    now, policy = [1.0], Listening()
    return PrefixCache(num_blocks, 2, policy, clock=lambda: now[0]), policy, now


def test_a_policy_is_notified_when_nodes_fall_idle_and_when_they_are_reused() -> None:
    cache, policy, now = make_cache()
    leave(cache, [1, 1, 2, 2, 3])
    # The partly filled block extends the node while its sequence is the only one.
    assert policy.taken() == [("idle", 3, 1.0)]
    now[0] = 5.0
    table = cache.open([1, 1, 2, 2, 9])
    assert policy.taken() == [("reuse", 7, 2, 1.0, 5.0)]
    now[0] = 6.0
    child = cache.fork(table)[0]
    cache.abort(table)
    assert policy.taken() == []  # the fork still uses it
    cache.abort(child)
    assert policy.taken() == [("idle", 2, 6.0)]
    pin = cache.pin([1, 1])
    assert policy.taken() == [("reuse", 7, 1, 6.0, 6.0)]
    cache.release(pin)
    assert policy.taken() == [("idle", 1, 6.0)]


def test_a_policy_is_notified_when_a_sequence_computes_what_is_idle() -> None:
    cache, policy, now = make_cache()
    late = cache.open([1, 1, 2])
    cache.reserve(late, 2)
    leave(cache, [1, 1])
    now[0] = 3.0
    policy.taken()
    cache.append(late, [1, 1])
    assert policy.taken() == [("reuse", 7, 1, 1.0, 3.0)]


def test_a_policy_is_notified_when_what_was_evicted_is_requested_again() -> None:
    cache, policy, now = make_cache(4)
    leave(cache, [1, 1, 2, 2])
    press(cache, 4)
    now[0] = 9.0
    policy.taken()
    compute(cache, [1, 1, 2, 2, 3])
    assert policy.taken() == [("reuse", 7, 2, 1.0, 9.0)]


def test_every_insertion_and_removal_is_an_event() -> None:
    log = EventLog()
    cache = PrefixCache(4, 2, events=log)

    def kinds() -> list[tuple[str, int]]:
        return [
            (type(event).__name__, len(event.block_hashes) if isinstance(event, BlocksStored | BlocksRemoved) else 0)
            for event in log.take()
        ]

    leave(cache, [1, 1, 2])
    assert kinds() == [("BlocksStored", 1), ("BlocksStored", 1)]
    leave(cache, [1, 1, 2, 2])  # the fuller block replaces the partly filled one
    assert kinds() == [("BlocksRemoved", 1), ("BlocksStored", 1)]
    press(cache, 3)
    assert kinds() == [("BlocksRemoved", 1)]
    cache.clear("")
    assert kinds() == [("BlocksRemoved", 1)]
    cache.clear()
    assert [type(event) for event in log.take()] == [AllCleared]


def test_only_overridden_calls_are_made() -> None:
    class OnlyClears(TreeObserver):
        def on_clear(self, namespace: str | None, nodes: object) -> None: ...

    observers, calls = [OnlyClears(), Listening(), LRU()], ("on_insert", "on_remove", "on_clear", "on_idle", "on_reuse")
    assert [len(handlers(observers, call)) for call in calls] == [0, 0, 1, 1, 1]


class ListeningObserver(Listening, TreeObserver):
    """A policy that learns, and is an observer, too."""


def test_a_policy_is_not_removed_from_the_observers() -> None:
    """It learned nothing more then; and one that was also added was notified of everything twice."""
    policy = ListeningObserver()
    cache = PrefixCache(8, 2, policy, clock=lambda: 1.0)
    with pytest.raises(InvalidArgumentError, match="observer: expected one that was added, got "):
        cache.remove_observer(policy)
    for change in (cache.add_observer, cache.remove_observer):
        change(policy)
        cache.clear()
        leave(cache, [1, 1])
        assert policy.taken() == [("idle", 1, 1.0)]


@pytest.mark.parametrize("at_most", [(), (10**30,)], ids=["all", "more than there are"])
def test_unread_events_are_dropped_and_counted_and_others_taken_from_the_beginning(at_most: tuple[int, ...]) -> None:
    log = EventLog(max_events=2)
    cache = PrefixCache(8, 1, events=log)
    for token in range(5):
        leave(cache, [token])
    assert (len(log), log.num_dropped) == (2, 3)
    assert [len(log.take(1)), len(log.take(*at_most)), len(log)] == [1, 1, 0]
