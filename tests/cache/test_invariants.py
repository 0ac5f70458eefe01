"""`check` finds whatever is broken, and names it."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.cache_driver import leave

from radixkv.cache import LRU, BlockTable, InvariantViolation, Pin, PrefixCache
from radixkv.cache.children import Children
from radixkv.cache.node import Node, Root
from radixkv.cache.owner_limits import OwnerLimits


class State:
    """A sound cache, and what is in it, to be broken by hand.

    Its tree holds A B C in one node, D behind it, and a partly filled E; ``table`` is open on A B C with blocks of its own.
    """

    def __init__(self) -> None:
        self.cache = PrefixCache(16, 2)
        self.pool, self.tree = self.cache._pool, self.cache._tree
        for tokens in ([1, 1, 2, 2, 3, 3, 4, 4], [7]):
            leave(self.cache, tokens)
        self.table = self.cache.open([1, 1, 2, 2, 3, 3, 9, 9, 9])
        self.cache.reserve(self.table, 12)
        self.cache.append(self.table, [9])
        self.pin = self.cache.pin([1, 1])
        root = self.tree.roots[""]
        assert root.children is not None
        self.root: Node = root
        self.leaf = next(node for node in self.tree.nodes() if node.num_tokens == 2 and not node.lock_count)
        self.partial = next(node for node in self.tree.nodes() if node.num_tokens == 1)
        node = self.table.node
        assert node is not None
        self.node = node
        self.cache.check()

    @property
    def run(self) -> tuple[int, int]:
        """Start and stop of a free run of at least two blocks."""
        return next((start, stop) for start, stop in self.pool._stop_of.items() if stop - start > 1)


def set_item(container: Any, key: Any, value: Any) -> None:
    container[key] = value


def swap_published(table: BlockTable) -> None:
    table._ids[0], table._ids[1] = table._ids[1], table._ids[0]


def claim_more_tokens(table: BlockTable) -> None:
    table._tail += bytes(4 * 20)
    table.num_tokens += 20


def add_sibling(state: State) -> None:
    """A node whose tokens are the beginning of its neighbour's."""
    assert state.root.children is not None
    key = max(state.root.children, key=len)[:4]
    block = int(state.pool.allocate(1)[0])
    state.root.children[key] = Node(state.root, bytearray(key), array("i", [block]), 0)


def keep_a_dead_pin(state: State) -> None:
    state.cache._pins._pins[Pin("", 2, None)] = Root("", 8)


def limit(state: State) -> OwnerLimits:
    """Limits the owner of everything, which is then beyond its limit."""
    state.cache.limit_owners({"": 1})
    assert state.tree.owner_limits is not None
    return state.tree.owner_limits


BREAKAGES: list[tuple[str, Callable[[State], object]]] = [
    ("free twice", lambda s: s.pool._loose.append(np.array([s.run[0]]))),
    ("the indexes disagree", lambda s: set_item(s.pool._start_of, s.run[1], s.run[0] + 1)),
    ("the indexes disagree", lambda s: s.pool._classes[(s.run[1] - s.run[0]).bit_length()].pop(s.run[1])),
    ("touch and are not one", lambda s: s.pool._split_run(s.run[0], s.run[0] + 1)),
    ("differ in length", lambda s: set_item(s.pool._classes[0], 99, None)),
    ("differ in length", lambda s: set_item(s.pool._start_of, 99, 98)),
    ("free with owners, or held without", lambda s: set_item(s.pool.ref_counts, s.run[0], 1)),
    ("free with owners, or held without", lambda s: set_item(s.pool.ref_counts, s.leaf.blocks[0], 0)),
    ("free runs above size class 2", lambda s: setattr(s.pool, "_top_class", 2)),
    ("num_free is", lambda s: setattr(s.pool, "num_free", s.pool.num_free + 1)),
    ("not a root of that name", lambda s: set_item(s.tree.roots, "other", s.root)),
    ("not a root of that name", lambda s: setattr(s.root, "parent", s.leaf)),
    ("not a root of that name", lambda s: s.root.blocks.append(0)),
    ("not a root of that name", lambda s: s.root.tokens.extend(b"1234")),
    ("is unused and still there", lambda s: s.tree.root("empty")),
    ("a node of 2 tokens has 2 blocks", lambda s: s.leaf.blocks.append(s.run[0])),
    (
        "filed under a key that is not its own",
        lambda s: (s.leaf.tokens.clear(), s.leaf.blocks.__delitem__(slice(None))),
    ),
    ("is locked or has children", lambda s: setattr(s.partial, "lock_count", 1)),
    ("is locked or has children", lambda s: setattr(s.partial, "children", {b"": s.leaf})),
    ("keeps an empty index of children", lambda s: setattr(s.leaf, "children", Children())),
    ("continue those of its sibling", add_sibling),
    ("filed under a key", lambda s: set_item(s.root.children, b"other", s.node)),
    ("or has another parent", lambda s: setattr(s.leaf, "parent", s.root)),
    ("pins and has", lambda s: setattr(s.node, "num_pins", 1)),
    ("blocks count as pinned, 1 are", lambda s: setattr(s.cache._pins, "num_blocks", 3)),
    ("holds a block twice", lambda s: set_item(s.table._ids, 4, s.table._ids[3])),
    ("in it twice, or counted", lambda s: set_item(s.leaf.blocks, 0, s.partial.blocks[0])),
    ("in it twice, or counted", lambda s: setattr(s.table, "_num_published", 1)),
    ("owners and has", lambda s: set_item(s.pool.ref_counts, s.leaf.blocks[0], 5)),
    ("owners and has", lambda s: set_item(s.table._ids, 4, s.pool.allocate(2)[0])),
    ("no longer in the tree", keep_a_dead_pin),
    ("locks and has", lambda s: setattr(s.node, "lock_count", 9)),
    ("locks and has", lambda s: s.cache._pins._pins.clear()),
    ("closed table is still live", lambda s: setattr(s.table, "closed", True)),
    ("not those it counts", lambda s: s.table._tail.extend(b"1234")),
    ("blocks has 27 tokens", lambda s: claim_more_tokens(s.table)),
    ("published blocks are not those", lambda s: swap_published(s.table)),
    ("count as evictable", lambda s: setattr(s.tree, "num_evictable_blocks", 0)),
    ("a higher priority than its parent", lambda s: setattr(s.leaf, "priority", 1)),
    ("the eviction index", lambda s: s.tree.policy.remove(s.leaf)),
    ("not indexed where they should be", lambda s: (limit(s), setattr(s.tree, "leaves", s.tree.policy))),
    ("not indexed where they should be", lambda s: setattr(s.tree, "leaves", LRU())),
    ("'' counts 9 blocks and has 5", lambda s: limit(s)._num_blocks.update({"": 4})),
    ("'' has 5 blocks of 1, which was not noticed", lambda s: limit(s)._beyond.clear()),
    ("the eviction index of '' is not its leaves", lambda s: limit(s)._leaves[""].remove(s.leaf)),
    ("tokens queried", lambda s: setattr(s.cache._stats, "reused_tokens", 0)),
    ("tokens queried", lambda s: setattr(s.cache._stats, "computed_tokens", 0)),
    ("tokens queried", lambda s: setattr(s.cache._stats, "abandoned_tokens", 7)),
    ("tokens queried", lambda s: setattr(s.table, "num_unaccounted_tokens", 0)),
]


@pytest.mark.parametrize(("message", "break_it"), BREAKAGES, ids=[f"{n} {m}" for n, (m, _) in enumerate(BREAKAGES)])
def test_check_names_what_is_broken(message: str, break_it: Callable[[State], object]) -> None:
    state = State()
    break_it(state)
    with pytest.raises(InvariantViolation, match=message):
        state.cache.check()


def test_the_numbers_in_a_message_are_the_right_ones() -> None:
    state = State()
    block = int(state.leaf.blocks[0])
    state.pool.ref_counts[block] = 5
    with pytest.raises(InvariantViolation, match=f"block {block} counts 5 owners and has 1"):
        state.cache.check()
    state = State()
    locks = state.node.lock_count
    state.node.lock_count = 9
    with pytest.raises(InvariantViolation, match=f"a node counts 9 locks and has {locks}"):
        state.cache.check()
    assert np.count_nonzero(state.pool.ref_counts) == state.cache.num_held_blocks
