"""The outline is the most recently used part of the tree, whatever the tree."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from support.cache_driver import compute, leave, leave_unchecked

from radixkv.cache import NodeOutline, NodeSnapshot, PrefixCache
from radixkv.cache.outline import outline


def nodes_of(tree: NodeOutline | NodeSnapshot) -> list[NodeOutline | NodeSnapshot]:
    """All nodes below the root."""
    found: list[NodeOutline | NodeSnapshot] = []
    for child in tree.children:
        found += [child, *nodes_of(child)]
    return found


@given(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), max_size=20), st.integers(0, 12))
def test_it_shows_the_nodes_used_last_under_the_nodes_above_them(prompts: list[list[int]], max_nodes: int) -> None:
    cache = PrefixCache(200, 2)
    for prompt in prompts:
        leave(cache, prompt)
    whole = cache.tree_snapshot().get("")
    found = cache.outline("", max_nodes)
    if whole is None:
        assert found is None
        return
    assert found is not None
    shown, everything = nodes_of(found), nodes_of(whole)
    assert len(shown) == min(max_nodes, len(everything))
    times = sorted((node.last_use for node in everything), reverse=True)
    assert sorted((node.last_use for node in shown), reverse=True) == times[: len(shown)]
    hidden = sum(node.num_hidden for node in [found, *shown])
    assert hidden + len(shown) <= len(everything)
    if max_nodes >= len(everything):
        assert hidden == 0
        assert [(n.num_tokens, n.num_blocks) for n in shown] == [(len(n.tokens), len(n.block_ids)) for n in everything]


def test_a_node_in_use_says_by_how_many() -> None:
    cache = PrefixCache(100, 4)
    stem = list(range(8))
    for last in (20, 21):
        compute(cache, [*stem, last, 1, 2, 3])
    found = cache.outline("")
    assert found is not None
    (shared,) = found.children
    assert (shared.num_tokens, shared.num_blocks, shared.lock_count) == (8, 2, 2)
    assert [(child.num_tokens, child.lock_count) for child in shared.children] == [(4, 1), (4, 1)]
    assert np.frombuffer(shared.beginning, dtype=np.int32).tolist() == stem
    beginnings = [np.frombuffer(child.beginning, dtype=np.int32).tolist() for child in shared.children]
    assert beginnings == [[20, 1, 2, 3], [21, 1, 2, 3]]
    assert all(node.last_use <= cache.now() for node in (found, shared))
    assert cache.outline("another namespace") is None


def test_of_a_long_node_only_the_beginning_is_copied() -> None:
    cache = PrefixCache(100, 4)
    compute(cache, range(200))
    found = cache.outline("")
    assert found is not None
    (long,) = found.children
    assert long.num_tokens == 200
    assert np.frombuffer(long.beginning, dtype=np.int32).tolist() == list(range(32))


def test_siblings_that_begin_alike_have_different_keys() -> None:
    """In blocks of 64 tokens they had one key, that of their first 32: the page drew all of them as one box."""
    cache = PrefixCache(100, 64)
    for last in (1, 2):
        leave(cache, [*range(40), *[last] * 24])
    found = cache.outline("")
    assert found is not None
    one, other = found.children
    assert one.beginning == other.beginning
    assert one.key != other.key
    again = cache.outline("")
    assert again is not None
    assert [child.key for child in again.children] == [one.key, other.key]


def test_a_tree_of_any_size_takes_bounded_work() -> None:
    cache = PrefixCache(5000, 1)
    rng = random.Random(0)
    for number in range(1000):
        leave_unchecked(cache, [number, rng.randrange(100), 3])
    root = cache._tree.roots[""]
    found = outline(root, 50, max_visited=200)
    assert len(nodes_of(found)) == 50
    assert found.num_hidden == 950
    # Of the 200 children looked at, as many are shown as the limit allows.
    assert len(nodes_of(outline(root, 500, max_visited=200))) == 200
    assert outline(root, 0, max_visited=200).num_hidden == 1000


def test_the_bound_on_the_work_is_for_all_levels_together() -> None:
    cache = PrefixCache(1000, 1)
    for number in range(400):
        leave_unchecked(cache, [number % 20, number])
    assert len(nodes_of(outline(cache._tree.roots[""], 500, max_visited=30))) == 30
