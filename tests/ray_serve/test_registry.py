"""What replicas report of themselves, what ingresses make of it, and what is left of it when the registry is lost."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from radixkv.ray.registry import LEASE_SECONDS, Registry
from radixkv.ray.scaling import POOL_USAGE, REQUESTS, LoadPolicy


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_replica_that_is_silent_is_gone() -> None:
    clock = Clock()
    registry = Registry(clock)
    registry.renew("a", "http://a:1", "secret")
    clock.now += LEASE_SECONDS - 1
    registry.renew("b", "http://b:1", "secret")
    assert registry.listing().urls == {"a": "http://a:1", "b": "http://b:1"}
    clock.now += 2
    assert registry.listing().urls == {"b": "http://b:1"}
    registry.leave("b")
    registry.leave("b")
    assert registry.listing().urls == {}


def test_a_replica_that_has_left_is_not_listed_again_by_a_renewal_that_comes_late() -> None:
    """It was listed for ten more seconds, in which it counted as down, and nothing could be cleared."""
    clock = Clock()
    registry = Registry(clock)
    registry.renew("a", "http://a:1", "secret")
    registry.leave("a")
    assert registry.listing().urls == {}
    clock.now += LEASE_SECONDS - 1
    assert registry.listing().urls == {}
    registry.renew("a", "http://a:1", "secret")
    assert registry.listing().urls == {}
    clock.now += 2
    assert registry.listing().urls == {}
    assert not registry._replicas  # nothing is kept of it


def test_a_registry_that_was_lost_takes_no_replica_away() -> None:
    """One that was late with its report, as any may be, was gone until it came."""
    clock = Clock()
    held = {"a": "http://a:1", "b": "http://b:1"}
    registry = Registry(clock)
    assert registry.listing().after(held) == held
    registry.renew("b", "http://b:1", "secret")
    registry.renew("c", "http://c:1", "secret")
    assert registry.listing().after(held) == {**held, "c": "http://c:1"}
    clock.now += LEASE_SECONDS - 1
    for name in "bc":
        registry.renew(name, f"http://{name}:1", "secret")
    assert registry.listing().after(held) == {**held, "c": "http://c:1"}
    clock.now += 1
    assert registry.listing().after(held) == {"b": "http://b:1", "c": "http://c:1"}


def test_a_registry_that_was_unreachable_at_first_gives_replicas_the_time_to_report() -> None:
    """On a loaded machine, calls came when it counted as complete: all replicas were gone, and a second secret was made."""
    clock = Clock()
    registry = Registry(clock)
    clock.now += 60
    assert registry.listing().after({"a": "http://a:1"}) == {"a": "http://a:1"}
    assert registry.secret("new") is None
    registry.renew("a", "http://a:1", "mine")
    clock.now += LEASE_SECONDS
    assert registry.listing().complete
    assert registry.secret("new") == "mine"


def test_the_secret_outlives_the_registry() -> None:
    clock = Clock()
    registry = Registry(clock)
    assert registry.secret("mine") is None  # others may be there, and have one
    clock.now += 2.9
    assert registry.secret("mine") is None
    clock.now += 0.1
    assert registry.secret("mine") == registry.secret("another") == "mine"
    registry.renew("late", "http://late:1", "its own")
    assert registry.secret("new") == "mine"

    registry = Registry(clock)
    assert registry.secret("new") is None
    registry.renew("a", "http://a:1", "mine")
    assert registry.secret("new") == "mine"


def wanted(
    requests_per_replica: int, running: Sequence[str] = (), target: int = 0, **metrics: dict[str, float]
) -> float:
    context = SimpleNamespace(aggregated_metrics=metrics, running_replicas=running, target_num_replicas=target)
    number, state = LoadPolicy(requests_per_replica)(context)
    assert state == {}
    return number


def test_replicas_follow_requests_and_tokens() -> None:
    requests = {"a": 30.0, "b": 10.0}
    assert wanted(16, **{REQUESTS: requests, POOL_USAGE: {"a": 0.1, "b": 0.1}}) == 2.5
    # Few requests, but no room for their tokens.
    assert 2 < wanted(64, **{REQUESTS: requests, POOL_USAGE: {"a": 0.9, "b": 1.0}}) < 3
    assert wanted(16, running="ab", target=2, **{REQUESTS: dict.fromkeys("ab", 0.0)}) == 0


def test_a_replica_without_figures_is_not_thought_to_be_idle() -> None:
    """On a busy machine, replicas used to be removed and started again before the figures of all had arrived."""
    assert wanted(16, running="abc", target=4) == 4
    assert wanted(16, running="abc", target=4, **{REQUESTS: {"a": 0.0, "b": 0.0}}) == 4
    assert wanted(16, running="abc", target=4, **{REQUESTS: {"a": 60.0, "b": 20.0}}) == 5
