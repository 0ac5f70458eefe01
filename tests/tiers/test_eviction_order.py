"""Which blocks make room first: leaves, as they were used."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.tier_model import prefix_keys

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.eviction_order import EvictionOrder

PREFIXES = st.lists(st.integers(0, 1), min_size=1, max_size=5).map(lambda blocks: prefix_keys("", *blocks))
CALLS = st.tuples(st.sampled_from(["add", "use", "remove", "hold", "release"]), PREFIXES, st.integers(0, 4))


class PlainOrder:
    """What `EvictionOrder` is to do, by going through all blocks."""

    def __init__(self) -> None:
        self.last_use: dict[BlockKey, int] = {}
        self.held: list[BlockKey] = []
        self.now = 0

    def use(self, keys: list[BlockKey]) -> None:
        """Each was used now, after those behind it, and so was all before them."""
        for key in reversed(keys):
            if key in self.last_use:
                self.now += 1
                for each in (key, *before(key)):
                    if each in self.last_use:
                        self.last_use[each] = self.now

    def first(self) -> bytes | None:
        protected = {each for key in self.last_use for each in before(key)}
        protected |= {each for key in self.held for each in (key, *before(key))}
        leaves = self.last_use.keys() - protected
        return min(leaves, key=self.last_use.__getitem__).digest if leaves else None


def before(key: BlockKey) -> list[BlockKey]:
    return [] if key.parent is None else [key.parent, *before(key.parent)]


@given(st.lists(CALLS, max_size=40))
def test_the_leaf_that_was_used_longest_ago_is_first(calls: list[tuple[str, list[BlockKey], int]]) -> None:
    order, plain = EvictionOrder(), PlainOrder()
    for call, keys, start in calls:
        key = keys[-1]
        if call == "add":
            order.add(key)
            plain.last_use.setdefault(key, 0)
            plain.use([key])
        elif call == "use":
            part = keys[start:]
            order.use(part)
            plain.use([*before(part[0])[:1], *part] if part else [])
        elif call == "remove" and key in plain.last_use:
            order.remove(key.digest)
            del plain.last_use[key]
        elif call == "hold":
            order.hold(key)
            plain.held.append(key)
        elif call == "release" and key in plain.held:
            order.release(key)
            plain.held.remove(key)
        assert order.first() == plain.first()
    for key in plain.held:
        order.release(key)
    while (digest := order.first()) is not None:
        order.remove(digest)
    assert order._last_use == order._parents == order._num_children == {}  # nothing of it stays
    assert not order._present


def test_of_blocks_from_an_earlier_process_those_before_another_are_learned_from_it() -> None:
    keys, other = prefix_keys("", *range(3)), prefix_keys("b", 1)
    order = EvictionOrder(key.digest for key in (*keys[:2], *other))
    assert order.first() == keys[0].digest
    order.add(keys[2])
    assert order.first() == other[0].digest


@pytest.mark.parametrize("is_there", [True, False])
def test_what_is_before_a_block_is_gone_through_once(is_there: bool) -> None:
    """Each put of one block went through the thousands before it, which took milliseconds."""
    order, keys = EvictionOrder(), prefix_keys("", *range(4))
    if is_there:
        order.add(keys[0])
    order.add(keys[2])
    order.add(replace(keys[3], parent=replace(keys[2], parent=None)))
    order.remove(keys[2].digest)
    assert order.first() == keys[3].digest
    order.remove(keys[3].digest)
    assert order.first() == (keys[0].digest if is_there else None)


def test_a_use_of_a_block_that_was_lost_counts_for_those_before_it() -> None:
    """The first of a prefix made room as if only what was behind the lost block had been used."""
    order, keys, other = EvictionOrder(), prefix_keys("", *range(3)), prefix_keys("b", 1)
    for key in reversed(keys):
        order.add(key)
    order.add(other[0])
    order.use(keys[:2])
    order.remove(keys[1].digest)
    order.remove(keys[2].digest)
    assert order.first() == other[0].digest


def test_of_prefixes_that_part_behind_a_gap_the_last_use_counts_for_those_before_it() -> None:
    """It was that of the one which made room last."""
    order, keys, other = EvictionOrder(), prefix_keys("", 1, 2, 3), prefix_keys("b", 1)
    order.add(keys[0])
    old = prefix_keys("", 1, 2, 4)[2]
    order.add(old)
    order.add(other[0])
    order.add(keys[2])
    order.remove(keys[2].digest)
    order.remove(old.digest)
    assert order.first() == other[0].digest
