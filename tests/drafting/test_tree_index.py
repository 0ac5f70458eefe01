"""The index of token runs over a cache whose tree is published to, split, evicted and cleared."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st
from support.cache_driver import compute, leave

from radixkv.cache import PrefixCache
from radixkv.drafting import DraftContext
from radixkv.drafting.kgrams import RUN_LENGTHS
from radixkv.drafting.sources import TreeDrafter
from radixkv.drafting.tree_index import TreeIndex


def make(num_blocks: int = 64, block_size: int = 4) -> tuple[PrefixCache, TreeDrafter]:
    index = TreeIndex(num_blocks, block_size)
    cache = PrefixCache(num_blocks, block_size, observers=[index])
    return cache, TreeDrafter(index)


def draft(drafter: TreeDrafter, tokens: list[int], namespace: str = "", most: int = 6) -> list[int]:
    return list(drafter.draft(DraftContext(tokens, len(tokens), namespace), most).token_ids)


def test_what_followed_the_last_tokens_anywhere_is_found() -> None:
    cache, drafter = make()
    leave(cache, list(range(100, 130)))
    assert draft(drafter, [1, 2, 106, 107, 108, 109]) == [110, 111, 112, 113, 114, 115]
    assert draft(drafter, [1, 2, 106, 107, 108, 5]) == []
    assert draft(drafter, [126, 127, 128, 129]) == []
    assert draft(drafter, [124, 125, 126, 127]) == [128, 129]


def test_a_longer_run_comes_before_a_later_shorter_one() -> None:
    cache, drafter = make()
    for tokens in [1, 2, 3, 4, 10, 11], [9, 2, 3, 4, 20, 21], [9, 9, 3, 4, 30, 31], [9, 9, 9, 4, 40, 41]:
        leave(cache, tokens)
    for sequence, expected in ([1, 2, 3, 4], [10]), ([7, 2, 3, 4], [30]), ([7, 7, 3, 4], [30]), ([7, 7, 7, 4], []):
        assert draft(drafter, sequence)[:1] == expected


def test_a_run_that_nothing_follows_leaves_it_to_a_shorter_one() -> None:
    cache, drafter = make()
    leave(cache, [1, 2, 3, 4])
    leave(cache, [9, 9, 3, 4, 30, 31])
    assert draft(drafter, [1, 2, 3, 4]) == [30, 31]


def test_another_namespace_is_not_looked_at() -> None:
    cache, drafter = make()
    leave(cache, list(range(100, 130)), namespace="ann")
    assert draft(drafter, [106, 107, 108, 109], "ben") == []
    assert draft(drafter, [106, 107, 108, 109], "ann") == [110, 111, 112, 113, 114, 115]


def test_runs_across_splits_are_found_where_they_are_now() -> None:
    cache, drafter = make()
    leave(cache, list(range(100, 130)))
    leave(cache, [*range(100, 114), 7, 8, 9, 10, 11])  # splits the path after 12 tokens
    assert draft(drafter, [102, 103, 104, 105])[:4] == [106, 107, 108, 109]
    assert draft(drafter, [118, 119, 120, 121]) == [122, 123, 124, 125, 126, 127]
    assert draft(drafter, [113, 7, 8, 9]) == [10, 11]
    leave(cache, [*range(100, 112), 50, 51, 52, 53])
    assert draft(drafter, [111, 50]) == [51, 52, 53]


def test_what_is_evicted_or_cleared_is_no_longer_found() -> None:
    cache, drafter = make(num_blocks=8)
    leave(cache, list(range(100, 132)))
    leave(cache, list(range(200, 232)))
    assert draft(drafter, [106, 107, 108, 109]) == []
    assert draft(drafter, [206, 207, 208, 209])
    cache.clear()
    assert draft(drafter, [206, 207, 208, 209]) == []


def test_memory_is_bounded_by_the_blocks() -> None:
    index = TreeIndex(1000, 16)
    assert index.nbytes == 4 * (65_536 + 65_536 + 32_768) + 12 * 1000  # 40 bytes per token, rounded up; 12 per block


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_what_is_found_is_in_the_tree(data: st.DataObject) -> None:
    """Whatever was cached, split and evicted: a draft continues, within the namespace, some sequence that is cached now."""
    cache, drafter = make(num_blocks=12, block_size=3)
    rng = random.Random(data.draw(st.integers(0, 999)))
    for _ in range(12):
        tokens = [rng.randrange(3) for _ in range(rng.randint(1, 24))]
        namespace = rng.choice("ab")
        table = compute(cache, tokens, namespace=namespace)
        found = draft(drafter, tokens, namespace)
        if found:
            assert any(_contains(cached, tokens[-min(RUN_LENGTHS) :] + found) for cached in _cached(cache, namespace))
        if rng.random() < 0.8:
            cache.close(table)
        else:
            cache.abort(table)
        cache.check()


def _cached(cache: PrefixCache, namespace: str) -> list[list[int]]:
    root = cache._tree.roots.get(namespace)
    paths, pending = [], [] if root is None else [(root, [])]
    while pending:
        node, before = pending.pop()
        tokens = before + list(memoryview(bytes(node.tokens)).cast("i"))
        paths.append(tokens)
        pending += [(child, tokens) for child in (node.children or {}).values()]
    return paths


def _contains(text: list[int], run: list[int]) -> bool:
    return any(text[i : i + len(run)] == run for i in range(len(text) - len(run) + 1))
