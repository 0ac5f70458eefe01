"""Blocks are reserved for tables all or none, counted whole, and given back where nothing was written."""

from __future__ import annotations

import numpy as np
import pytest
from support.cache_driver import compute, leave

from radixkv.cache import ClosedError, InvalidArgumentError, OutOfBlocks, PrefixCache


def test_many_tables_are_reserved_all_or_none() -> None:
    cache = PrefixCache(6, 2)
    stem = compute(cache, [1, 2, 3])
    tables = [stem, *cache.fork(stem, 2)]
    before = [table.block_ids.tolist() for table in tables]
    # Two of the three must copy the shared tail, the last may write it; four more blocks are free.
    with pytest.raises(OutOfBlocks) as caught:
        cache.reserve_many(tables, [6, 6, 6])
    assert (caught.value.needed, caught.value.free) == (5, 4)
    assert [table.block_ids.tolist() for table in tables] == before
    assert cache.drain_copies() == []
    cache.reserve_many(tables, [4, 6, 6])
    assert cache.num_free_blocks == 0
    assert [copy.num_tokens for copy in cache.drain_copies()] == [1, 1]
    assert len({int(table.block_ids[1]) for table in tables}) == 3
    cache.check()
    cache.reserve_many(tables, [4, 6, 6])
    cache.reserve_many([], [])
    with pytest.raises(InvalidArgumentError, match="expected 3, one per table"):
        cache.reserve_many(tables, [4, 6])
    with pytest.raises(InvalidArgumentError, match=r"^tables: expected distinct tables"):
        cache.reserve_many([stem, stem], [5, 5])
    for impossible in ([None], [7.5], ["7"], [4.0], [True]):
        with pytest.raises(InvalidArgumentError, match=r"^num_tokens: expected a whole number"):
            cache.reserve_many([stem], impossible)  # type: ignore[arg-type]
    for arguments, name in (((stem, [5]), "tables"), ((None, None), "tables"), (([stem], 5), "num_tokens")):
        with pytest.raises(InvalidArgumentError, match=rf"^{name}: expected a sequence, got "):
            cache.reserve_many(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="BlockTable"):
        cache.reserve_many([None], [5])  # type: ignore[list-item]
    with pytest.raises(ClosedError, match="another cache"):
        cache.reserve_many([PrefixCache(2, 2).open([1])], [2])


def test_numbers_of_numpy_are_whole_numbers() -> None:
    """They used to be refused under another argument's name, after blocks were evicted and other tables had got theirs."""
    cache = PrefixCache(np.int64(6), np.int32(2))
    tables = [cache.open([token]) for token in (1, 2)]
    cache.reserve_many(tables, np.array([2, 4]))
    assert [table.num_blocks for table in tables] == [1, 2]
    cache.reserve(tables[0], np.int16(6))
    cache.trim(tables[0], np.int64(0))
    assert tables[0].num_blocks == 0
    cache.require(np.int64(4))
    assert len(cache.fork(tables[1], np.int8(2))) == 2
    cache.check()


def test_blocks_that_are_begun_count_whole() -> None:
    cache = PrefixCache(3, 4)
    tables = [cache.open([number], write=False) for number in range(2)]
    cache.reserve_many(tables, [4, 4])
    with pytest.raises(OutOfBlocks):
        cache.reserve_many(tables, [6, 6])
    assert [table.num_blocks for table in tables] == [1, 1]


def test_room_that_a_fork_took_away_comes_back_with_its_end() -> None:
    cache = PrefixCache(3, 4)
    table = compute(cache, [1, 2])
    cache.reserve(table, 8)
    child = cache.fork(table)[0]
    with pytest.raises(InvalidArgumentError, match="only 2 positions are reserved"):
        cache.append(table, [3])
    cache.abort(child)
    cache.reserve_many([table], [8])
    cache.append(table, [3, 4, 5, 6, 7, 8])
    assert table.num_blocks == 2
    assert cache.stats.copied_blocks == 0


def test_a_copy_has_no_other_owner() -> None:
    """When a table forks in the middle of a block, the last to write keeps the block, and all others copy it."""
    cache = PrefixCache(10, 4)
    table = compute(cache, [1, 2])
    block = int(table.block_ids[0])
    children = cache.fork(table, 2)
    assert cache.ref_counts()[block] == 3
    for child in children:
        cache.reserve(child, 3)
    cache.reserve(table, 3)
    assert [copy.source for copy in cache.drain_copies()] == [block, block]
    assert table.block_ids.tolist() == [block]
    assert cache.ref_counts().tolist().count(1) == 3


def test_a_load_of_a_single_block_takes_a_low_one_too() -> None:
    cache = PrefixCache(64, 2)
    compute(cache, [1, 2])
    table = cache.open_fill([3, 4])
    cache.reserve(table, 2)
    assert table.block_ids.tolist() == [1]  # without a preference, amid the free blocks


def test_a_refusal_says_what_is_missing() -> None:
    cache = PrefixCache(4, 2)
    leave(cache, [1, 2, 3])
    table = cache.open([7, 7, 7], write=False)
    cache.reserve(table, 3)
    with pytest.raises(OutOfBlocks, match="4 blocks needed, 0 free and 2 evictable") as caught:
        cache.reserve(table, 11)
    assert (caught.value.needed, caught.value.free, caught.value.evictable) == (4, 0, 2)
    assert cache.num_available_blocks == 2


def test_trimming_gives_back_what_was_reserved_and_not_written() -> None:
    cache = PrefixCache(10, 4)
    table = cache.open([1, 2, 3, 4, 5])
    cache.reserve(table, 30)
    version = table.version
    cache.append(table, [1, 2, 3, 4, 5])
    cache.trim(table, 9)
    assert (table.num_blocks, table.num_writable, cache.num_free_blocks) == (3, 12, 7)
    assert table.version > version
    cache.trim(table, 0)  # what holds tokens stays
    assert table.num_blocks == 2
    cache.check()
    cache.append(table, [6])
    with pytest.raises(InvalidArgumentError, match="positions are reserved"):
        cache.append(table, [7, 8, 9])
    with pytest.raises(InvalidArgumentError, match="num_tokens: expected"):
        cache.trim(table, -1)
    cache.close(table)
    with pytest.raises(ClosedError):
        cache.trim(table, 1)
