"""What the cache promises, by example, where the random machine cannot easily say it."""

from __future__ import annotations

from typing import Any

import pytest
from support.cache_driver import compute, leave, leave_unchecked, press

from radixkv.cache import BlockCopy, NodeSnapshot, OutOfBlocks, PrefixCache


def shape(cache: PrefixCache) -> Any:
    def of(node: NodeSnapshot) -> Any:
        return len(node.tokens), [of(child) for child in node.children]

    return {name: of(root) for name, root in cache.tree_snapshot().items()}


def test_a_match_ends_at_any_token_and_costs_one_block_copy() -> None:
    cache = PrefixCache(20, 4)
    leave(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    table = cache.open([1, 2, 3, 4, 5, 6, 9])
    assert table.num_cached_tokens == 6
    (copy,) = cache.drain_copies()
    assert copy == BlockCopy(source=copy.source, target=int(table.block_ids[1]), num_tokens=2)
    assert copy.source != copy.target


def test_a_full_hit_computes_one_token() -> None:
    cache = PrefixCache(20, 4)
    leave(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    assert cache.open([1, 2, 3, 4, 5, 6, 7, 8]).num_cached_tokens == 7


def test_a_long_chat_is_one_node() -> None:
    cache = PrefixCache(200, 4)
    tokens = [0]
    for turn in range(40):
        tokens = [*tokens, *range(turn, turn + 7)]
        leave(cache, tokens)
    assert shape(cache) == {"": (0, [(281, [])])}


def test_a_table_s_blocks_are_for_reading() -> None:
    """These arrays used to be writable: writing changed the cache's own bookkeeping, and freed blocks that others used."""
    cache = PrefixCache(20, 4)
    table = cache.open([1, 2, 3, 4, 5])
    cache.reserve(table, 5)
    for blocks in (table.block_ids, table.own_block_ids):
        with pytest.raises(ValueError, match="read-only"):
            blocks[0] = 7
    cache.append(table, [1, 2, 3, 4, 5])
    cache.close(table)
    cache.check()


def test_the_same_block_computed_twice_is_kept_once() -> None:
    cache = PrefixCache(20, 4)
    first = cache.open([1, 2, 3, 4, 5])
    second = cache.open([1, 2, 3, 4, 6])
    for table in (first, second):
        cache.reserve(table, 5)
    cache.append(first, [1, 2, 3, 4])
    version = second.version
    cache.append(second, [1, 2, 3, 4])
    assert first.block_ids[0] == second.block_ids[0]
    assert second.version > version
    assert cache.stats.deduplicated_blocks == 1
    cache.check()


def test_a_fuller_block_replaces_the_partly_filled_one() -> None:
    cache = PrefixCache(20, 4)
    leave(cache, [1, 2])
    leave(cache, [1, 2, 3])
    assert shape(cache) == {"": (0, [(3, [])])}
    assert cache.num_held_blocks == 1


def test_the_least_recently_used_leaf_goes_first_from_its_tail() -> None:
    cache = PrefixCache(8, 2)
    leave(cache, [1, 1, 2, 2, 3, 3])
    leave(cache, [4, 4, 5, 5, 6, 6])
    leave(cache, [1, 1, 2, 2, 3, 3])
    table = cache.open(list(range(20, 27)))
    cache.reserve(table, 7)
    assert cache.match([4, 4, 5, 5, 6, 6]) == 2
    assert cache.match([1, 1, 2, 2, 3, 3]) == 6
    assert cache.stats.evicted_blocks == 2
    assert cache.stats.evicted_tokens == 4


def test_leaves_go_before_their_parents() -> None:
    cache = PrefixCache(4, 1)
    leave(cache, [1, 2, 3])
    leave(cache, [1, 2, 4])
    for count, known in ((1, 2), (2, 2), (3, 1), (4, 0)):
        press(cache, count)
        assert cache.match([1, 2, 3]) == known


def test_no_copy_block_where_everything_is_in_use() -> None:
    cache = PrefixCache(2, 4)
    table = compute(cache, [1, 2, 3, 4, 5, 6, 7, 8])
    before = shape(cache), cache.stats
    with pytest.raises(OutOfBlocks) as caught:
        cache.open([1, 2, 9])
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (1, 0, 0)
    assert (shape(cache), cache.stats) == before
    assert not table.closed


def test_namespaces_never_share_and_roots_go_when_empty() -> None:
    cache = PrefixCache(20, 2)
    leave(cache, [1, 2, 3], namespace="a")
    assert cache.match([1, 2, 3], "b") == 0
    assert cache.open([1, 2, 3], "b").num_cached_tokens == 0
    assert cache.clear("a") == 2
    assert set(cache.tree_snapshot()) == {"b"}


def test_a_table_that_was_open_at_a_clear_goes_on_but_makes_nothing_known() -> None:
    cache = PrefixCache(20, 2)
    table = compute(cache, [1, 2, 3, 4])
    child = cache.fork(table)[0]
    cache.clear()
    cache.reserve(table, 6)
    cache.append(table, [5, 6])
    cache.close(table)
    cache.close(child)
    assert cache.match([1, 2]) == 0
    assert cache.num_free_blocks == 20


def test_a_deep_and_a_wide_tree() -> None:
    cache = PrefixCache(20_000, 1)
    for token in range(3000):
        leave_unchecked(cache, [7, token])
    deep: list[int] = []
    for token in range(300):
        deep.append(token % 3)
        leave_unchecked(cache, [8, *deep, 5])
    cache.check()
    assert cache.match([8, *deep, 5]) == 302
    assert cache.match([7, 2999]) == 2
    assert cache.clear() == cache.num_blocks - 20_000 + 3001 + 1 + 300 + 300


def test_a_copy_goes_behind_the_prefix_that_it_continues() -> None:
    cache = PrefixCache(64, 2)
    leave(cache, [1, 1])
    occupied = cache._pool.allocate(1, after=0)
    leave_unchecked(cache, [1, 1, 2, 2])
    assert occupied.tolist() == [1]
    cache._pool.release(occupied)
    table = cache.open([1, 1, 2, 7])
    assert table.num_cached_tokens == 3
    assert table.block_ids.tolist() == [0, 1]


def test_what_others_computed_meanwhile_is_found_node_by_node() -> None:
    cache = PrefixCache(40, 2)
    late = cache.open([1, 1, 2, 2, 3, 3, 4, 4, 5])
    cache.reserve(late, 9)
    leave(cache, [1, 1, 2, 2, 3, 3])
    leave(cache, [1, 1, 9, 9])  # cuts the others' path in two
    cache.append(late, [1, 1, 2, 2, 3, 3, 4, 4, 5])
    assert cache.stats.deduplicated_blocks == 3
    assert cache.num_held_blocks == 6
    cache.check()
    cache.close(late)
    assert cache.match([1, 1, 2, 2, 3, 3, 4, 4, 5]) == 9
    assert cache.num_held_blocks == 6


def test_stats_count_every_operation() -> None:
    cache = PrefixCache(40, 4)
    first = compute(cache, [1, 2, 3, 4, 5, 6])
    children = cache.fork(first, 3) + cache.fork(first)
    cache.reserve(first, 7)
    for child in children[:2]:
        cache.reserve(child, 7)
    cache.close(first)
    second = cache.open([1, 2, 3, 4, 5, 9, 9])
    for table in (*children, second):
        cache.abort(table)
    unread = cache.open([1, 2, 3, 4, 5], read=False)
    cache.reserve(unread, 5)
    cache.append(unread, [1, 2])
    cache.abort(unread)
    stats = cache.stats
    assert (stats.opened_tables, stats.forked_tables) == (3, 4)
    assert (stats.queried_tokens, stats.reused_tokens) == (6 + 7 + 5, 5)
    assert (stats.computed_tokens, stats.abandoned_tokens) == (6 + 2, 2 + 3)
    assert stats.copied_blocks == 4
    assert (stats.deduplicated_blocks, stats.evicted_blocks, stats.evicted_tokens) == (0, 0, 0)
    cache.check()


def test_a_fork_knows_what_its_parent_was_opened_with() -> None:
    cache = PrefixCache(40, 4)
    leave(cache, [1, 2, 3, 4, 5])
    table = compute(cache, [1, 2, 3, 4, 9, 9], namespace="")
    child = cache.fork(table)[0]
    assert (child.num_prompt_tokens, child.num_cached_tokens, child.namespace) == (6, 4, "")
    assert child.tokens.tolist() == [1, 2, 3, 4, 9, 9]
    assert not child.closed
    assert child.version == 0
    cache.reserve(child, 7)
    assert child.version == 1
    cache.reserve(table, 7)
    assert table.version == 0


def test_clearing_one_namespace_leaves_the_others() -> None:
    cache = PrefixCache(40, 2)
    for name in ("a", "b", "c"):
        leave(cache, [1, 2, 3, 4], namespace=name)
    pins = {name: cache.pin([1, 2, 3, 4], name) for name in ("a", "b")}
    assert [pin.namespace for pin in pins.values()] == ["a", "b"]
    table = cache.open([1, 2, 3, 4], "a")
    other = cache.open([1, 2, 3, 4], "b")
    assert cache.clear("nobody") == 0
    assert cache.clear("a") == 1  # the other block is the table's
    assert (pins["a"].released, pins["b"].released) == (True, False)
    assert [cache.match([1, 2, 3, 4], name) for name in ("a", "b", "c")] == [0, 4, 4]
    cache.reserve(other, 4)
    cache.append(other, [4])
    cache.close(other)
    cache.close(table)
    assert cache.clear() == 4
    cache.release(pins["a"])
    cache.check()


def test_a_pin_keeps_its_prefix_and_nothing_more() -> None:
    cache = PrefixCache(6, 2)
    leave(cache, [1, 1, 2, 2, 3, 3, 4, 4, 5])
    pin = cache.pin([1, 1, 2, 2, 3])
    assert (pin.num_tokens, pin.released) == (4, False)
    table = cache.open([9] * 8, read=False, write=False)
    cache.reserve(table, 8)
    assert cache.match([1, 1, 2, 2, 3, 3]) == 4
    with pytest.raises(OutOfBlocks):
        cache.reserve(table, 9)
    cache.release(pin)
    assert pin.released
    cache.reserve(table, 9)
    cache.release(pin)
    cache.check()


def test_ref_counts_are_tables_and_the_tree() -> None:
    cache = PrefixCache(10, 2)
    table = compute(cache, [1, 2, 3, 4, 5])
    child = cache.fork(table)[0]
    first, second, tail = table.block_ids.tolist()
    assert [int(cache.ref_counts()[block]) for block in (first, second, tail)] == [3, 3, 2]
    cache.pin([1, 2])
    assert [int(cache.ref_counts()[block]) for block in (first, second, tail)] == [4, 3, 2]
    cache.abort(child)
    cache.close(table)
    assert [int(cache.ref_counts()[block]) for block in (first, second, tail)] == [2, 1, 1]
