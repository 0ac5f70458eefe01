"""Pins on one cache, without a model: what each tenant may keep from eviction, and whose pins are released for whom."""

from __future__ import annotations

import pytest
from support.cache_driver import leave

from radixkv.cache import PrefixCache
from radixkv.engine.named_pins import NamedPins
from radixkv.engine.tenant_pins import MAX_PINS, TenantPins, _Prefix

BLOCK = 4


class Clock:
    """Seconds that pass when told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make_cache(num_blocks: int, clock: Clock | None = None) -> PrefixCache:
    """A cache of which half may be pinned, and an eighth by one tenant."""
    return PrefixCache(num_blocks, BLOCK, clock=clock or Clock())


def prompt(number: int, num_blocks: int) -> list[int]:
    return [1000 * number + index for index in range(num_blocks * BLOCK)]


def keep(pins: TenantPins, cache: PrefixCache, tenant: str, tokens: list[int], ttl: float = 300.0) -> int:
    if cache.match(tokens, tenant) < len(tokens):
        leave(cache, tokens, namespace=tenant)
    return pins.keep(tenant, tenant, tokens, ttl)


def pin_for_administrator(cache: PrefixCache, tokens: list[int]) -> None:
    leave(cache, tokens, namespace="admin")
    cache.pin(tokens, "admin")


def num_pinned(cache: PrefixCache, tenant: str) -> int:
    return sum(pin.num_tokens // BLOCK for pin in cache.pins() if pin.namespace == tenant)


def test_a_tenant_keeps_no_more_than_its_share_and_the_oldest_goes_first() -> None:
    cache = make_cache(160)
    pins = TenantPins(NamedPins(cache))
    for number in range(5):
        assert keep(pins, cache, "a", prompt(number, 8)) == 8 * BLOCK
        assert num_pinned(cache, "a") <= 20
    assert {pin.num_tokens for pin in cache.pins()} == {8 * BLOCK}
    # Of a prompt that is longer than the share, only the beginning is pinned.
    assert keep(pins, cache, "b", prompt(9, 50)) == 20 * BLOCK
    assert num_pinned(cache, "a") == 16
    cache.check()


def test_a_tenant_has_a_bounded_number_of_pins() -> None:
    cache = make_cache(4000)
    pins = TenantPins(NamedPins(cache))
    for number in range(MAX_PINS + 10):
        assert keep(pins, cache, "a", prompt(number, 1)) == BLOCK
    assert len(cache.pins()) == MAX_PINS
    # Each of these continues those before it, which live longer.
    for length in range(1, MAX_PINS + 2):
        assert keep(pins, cache, "b", prompt(0, length), ttl=300.0 - length) == length * BLOCK
    assert sorted(pin.num_tokens // BLOCK for pin in cache.pins() if pin.namespace == "b") == [*range(2, MAX_PINS + 2)]


def test_pins_of_the_tenant_with_the_most_are_released_when_all_that_may_be_pinned_is() -> None:
    cache = PrefixCache(100, BLOCK, max_pinned_blocks=20)
    pins = TenantPins(NamedPins(cache))
    # Each may have 5; an administrator has 14 of the 20.
    pin_for_administrator(cache, prompt(0, 14))
    assert keep(pins, cache, "a", prompt(1, 2)) == 2 * BLOCK
    assert keep(pins, cache, "a", prompt(2, 3)) == 3 * BLOCK
    assert keep(pins, cache, "b", prompt(3, 2)) == 2 * BLOCK
    assert (num_pinned(cache, "a"), num_pinned(cache, "b")) == (3, 2)
    # Nobody has more than this tenant would have, so no pin is released: there is no room.
    for num_blocks in (4, 3):
        assert keep(pins, cache, "c", prompt(num_blocks, num_blocks)) == 0
        assert (num_pinned(cache, "a"), num_pinned(cache, "b"), num_pinned(cache, "admin")) == (3, 2, 14)
    cache.check()


def test_what_is_kept_stays_kept_where_more_of_it_has_no_room() -> None:
    cache = PrefixCache(40, BLOCK, max_pinned_blocks=16)
    pins = TenantPins(NamedPins(cache))
    assert keep(pins, cache, "a", prompt(1, 3)) == 3 * BLOCK
    pin_for_administrator(cache, prompt(0, 13))
    assert keep(pins, cache, "a", prompt(1, 4)) == 0
    assert (num_pinned(cache, "a"), num_pinned(cache, "admin")) == (3, 13)
    cache.check()


def test_what_finds_no_room_costs_nobody_a_pin() -> None:
    """The tenant's own pins used to be released before it was known whether the new one has room."""
    cache = PrefixCache(40, BLOCK, max_pinned_blocks=16)
    pins = TenantPins(NamedPins(cache))
    assert keep(pins, cache, "a", prompt(1, 3)) == 3 * BLOCK
    pin_for_administrator(cache, prompt(0, 13))
    assert keep(pins, cache, "a", prompt(2, 4)) == 0
    assert (num_pinned(cache, "a"), num_pinned(cache, "admin")) == (3, 13)
    # Nor does it cost others their pins, where those that have more cannot give enough.
    cache = PrefixCache(64, BLOCK, max_pinned_blocks=20)
    pins = TenantPins(NamedPins(cache))
    pin_for_administrator(cache, prompt(0, 13))
    for number in (1, 2):
        assert keep(pins, cache, "a", prompt(number, 2)) == 2 * BLOCK
    assert keep(pins, cache, "b", prompt(3, 3)) == 3 * BLOCK
    assert keep(pins, cache, "c", prompt(4, 5)) == 0
    assert [num_pinned(cache, name) for name in ("a", "b", "c")] == [4, 3, 0]
    cache.check()


def test_the_pins_to_release_are_found_without_comparing_the_tokens_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """All pins of all tenants were sorted by their tokens for each pin that had to go."""
    num_compared = []
    is_continued_by = _Prefix.is_continued_by

    def counted(prefix: _Prefix, other: _Prefix) -> bool:
        num_compared[-1] += 1
        return is_continued_by(prefix, other)

    monkeypatch.setattr(_Prefix, "is_continued_by", counted)
    for num_others in (5, 10):
        cache = PrefixCache(100, BLOCK, max_pinned_blocks=40)
        pins = TenantPins(NamedPins(cache))
        num_compared.append(0)
        for number in range(2 * num_others):
            keep(pins, cache, f"other {number % num_others}", prompt(number, 1))
        for number in (50, 51):
            keep(pins, cache, "most", prompt(number, 3))
        num_left = 40 - 2 * num_others - 6
        pin_for_administrator(cache, prompt(60, num_left))
        num_compared[-1] = 0
        assert keep(pins, cache, "new", prompt(61, 3)) == 3 * BLOCK
        assert (num_pinned(cache, "most"), len(cache.pins())) == (3, 2 * num_others + 3)
    assert num_compared[0] == num_compared[1]


def test_for_what_is_not_cached_no_pin_is_given_up() -> None:
    cache = make_cache(160)
    pins = TenantPins(NamedPins(cache))
    keep(pins, cache, "a", prompt(1, 15))
    assert pins.keep("a", "a", prompt(2, 15), 300.0) == 0
    assert num_pinned(cache, "a") == 15


def test_what_continues_a_longer_lived_pin_leaves_it_alone() -> None:
    """Common blocks used to count twice, so an hour's system prompt was dropped for the conversation of five minutes."""
    clock = Clock()
    cache = make_cache(160, clock)
    pins = TenantPins(NamedPins(cache))
    tokens = prompt(1, 20)
    assert keep(pins, cache, "a", tokens[: 12 * BLOCK], ttl=3600.0) == 12 * BLOCK
    for length in (15, 18, 20):
        assert keep(pins, cache, "a", tokens[: length * BLOCK], ttl=300.0) == length * BLOCK
        assert sorted(pin.num_tokens for pin in cache.pins()) == [12 * BLOCK, length * BLOCK]
    # A pin with blocks of its own goes first, whichever came first.
    keep(pins, cache, "a", prompt(2, 6), ttl=300.0)
    assert sorted(pin.num_tokens for pin in cache.pins()) == [6 * BLOCK, 12 * BLOCK]
    keep(pins, cache, "a", tokens[: 16 * BLOCK], ttl=300.0)
    assert sorted(pin.num_tokens for pin in cache.pins()) == [12 * BLOCK, 16 * BLOCK]
    clock.now = 301.0
    assert [pin.num_tokens for pin in cache.pins()] == [12 * BLOCK]
    cache.check()


def test_each_use_renews_a_pin_and_a_longer_prompt_replaces_the_shorter() -> None:
    clock = Clock()
    cache = make_cache(160, clock)
    pins = TenantPins(NamedPins(cache))
    keep(pins, cache, "a", prompt(1, 2))
    clock.now = 200.0
    keep(pins, cache, "a", prompt(1, 4))
    assert [pin.num_tokens for pin in cache.pins()] == [4 * BLOCK]
    clock.now = 499.0
    assert len(cache.pins()) == 1
    keep(pins, cache, "a", prompt(1, 4), ttl=3600.0)
    clock.now = 600.0
    # A pin for an hour is not shortened by one for five minutes of the same prefix, or of a part of it.
    assert keep(pins, cache, "a", prompt(1, 3)) == 3 * BLOCK
    assert [pin.expires_at for pin in cache.pins()] == [499.0 + 3600.0]
    # Nor is it replaced by a pin for five minutes of a longer prefix.
    keep(pins, cache, "a", prompt(1, 6))
    assert sorted(pin.num_tokens for pin in cache.pins()) == [4 * BLOCK, 6 * BLOCK]
    clock.now = 499.0 + 3600.0
    assert cache.pins() == []
    assert keep(pins, cache, "a", prompt(1, 3)) == 3 * BLOCK


def test_pins_are_apart_by_namespace_and_forgotten_when_cleared() -> None:
    cache = make_cache(160)
    pins = TenantPins(NamedPins(cache))
    for namespace in ("a", "a/salt"):
        leave(cache, prompt(1, 2), namespace=namespace)
        assert pins.keep("a", namespace, prompt(1, 2), 300.0) == 2 * BLOCK
    assert len(cache.pins()) == 2
    for _ in range(2):
        cache.clear("a/salt")
        assert [pin.namespace for pin in cache.pins()] == ["a"]
        leave(cache, prompt(1, 2), namespace="a/salt")
        assert pins.keep("a", "a/salt", prompt(1, 2), 300.0) == 2 * BLOCK
        assert sorted(pin.namespace for pin in cache.pins()) == ["a", "a/salt"]
    cache.clear("a/salt")
    for number in range(2, 6):
        keep(pins, cache, "a", prompt(number, 8))
    assert num_pinned(cache, "a") == 16
    cache.check()


def test_an_expired_pin_cannot_be_released_by_its_name() -> None:
    clock = Clock()
    cache = make_cache(160, clock)
    leave(cache, prompt(0, 1))
    pins = NamedPins(cache)
    pins.pin(prompt(0, 1), ttl=5)
    (listed,) = pins.listed()
    clock.now = 5.0
    assert not pins.release_named(listed.name)


def test_without_a_disk_a_pin_is_released_twice_without_a_word(caplog: pytest.LogCaptureFixture) -> None:
    cache = make_cache(160)
    leave(cache, prompt(0, 1))
    pins = NamedPins(cache)
    pin = pins.pin(prompt(0, 1))
    for _ in range(2):
        pins.release(pin)
    assert not cache.pins()
    assert not caplog.records
