"""What a cache tells without changing: a prefix's blocks and hashes, how a sequence may continue; and who observes it."""

from __future__ import annotations

import pytest
from support.cache_driver import leave

from radixkv.cache import BlockTable, InvalidArgumentError, PrefixCache
from radixkv.cache.block_hash import namespace_hash, next_hashes
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES, encode

SHORT = [1, 2, 3, 4]
LONG = [*SHORT, 5, 6, 7, 8, 9, 10]
OTHER = [*SHORT, 5, 6, 50, 60, 70]


def test_the_blocks_and_hashes_of_a_prefix() -> None:
    cache = PrefixCache(20, 2)
    leave(cache, LONG, namespace="a")
    assert cache.namespaces == ("a",)
    assert len(set(cache.cached_blocks([*LONG[:7], 99], "a").tolist())) == 3
    assert not len(cache.cached_blocks(LONG, "b"))
    with pytest.raises(InvalidArgumentError):
        cache.cached_blocks([-1])
    expected = next_hashes(namespace_hash("a"), encode(LONG), 2 * TOKEN_BYTES)
    assert sorted(cache.block_hashes().tolist()) == sorted(expected)
    assert not len(PrefixCache(2, 2).block_hashes())


def test_a_version_lasts_while_matches_do() -> None:
    cache = PrefixCache(20, 2)
    version = cache.version
    assert not len(cache.cached_blocks(LONG))
    assert cache.version == version
    leave(cache, LONG)
    assert cache.version != version


def test_a_sequence_may_go_on_as_others_did_that_were_used_most() -> None:
    cache = PrefixCache(40, 2)
    leave(cache, LONG)
    for _ in range(2):
        leave(cache, OTHER)
    table = cache.open([1, 2, 90])
    assert isinstance(table, BlockTable)
    for tokens, expected in (
        (SHORT, OTHER[4:]),
        (LONG[:7], LONG[7:]),
        (LONG[:5], OTHER[5:]),
        ([*SHORT, 99], []),
        ([*SHORT, 5, 99], []),
        ([1, 2, 80, 81, 82], []),
        (LONG, []),
    ):
        before = cache.stats, repr(cache.tree_snapshot())
        assert cache.continuation(table, tokens, 10) == expected
        assert (cache.stats, repr(cache.tree_snapshot())) == before
    assert cache.continuation(table, SHORT, 3) == OTHER[4:7]
    assert cache.continuation(cache.open([1, 2, 90], "another"), SHORT, 3) == []
    table.close()
    assert cache.continuation(table, SHORT, 3) == []


def test_the_cache_tells_its_time() -> None:
    assert PrefixCache(1, 1, clock=lambda: 7.0).now() == 7.0


def test_observers_come_and_go() -> None:
    class Counter(TreeObserver):
        inserted = 0

        def on_insert(self, node: Node, first: int) -> None:
            self.inserted += len(node.blocks) - first

    cache, counter = PrefixCache(20, 2), Counter()
    cache.add_observer(counter)
    leave(cache, LONG)
    cache.remove_observer(counter)
    leave(cache, [70, 80])
    assert counter.inserted == 5


def test_what_is_filled_in_is_cached_and_counts_as_no_sequence() -> None:
    cache = PrefixCache(20, 2)
    leave(cache, SHORT)
    before = cache.stats
    for namespace, cached, low in (("", 4, [2, 3, 4]), ("empty", 0, [5, 6, 7, 8, 9])):
        table = cache.open_fill(LONG, namespace)
        assert table.num_tokens == cached
        cache.reserve(table, len(LONG))
        assert table.own_block_ids.tolist() == low  # low blocks, whose memory is ready
        cache.append(table, LONG[cached:])
        cache.abort(table)
        assert len(cache.cached_blocks(LONG, namespace)) == 5
    cache.check()
    assert (cache.stats.opened_tables, cache.stats.queried_tokens) == (before.opened_tables, before.queried_tokens)
