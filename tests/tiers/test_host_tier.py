"""Host memory as a tier: what makes room, and calls at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest import mock

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tier_model import get, prefix_keys, random_blocks

from radixkv.tiers import host_tier
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.stats import StoreStats


def test_of_a_prefix_that_is_put_in_several_calls_the_head_is_kept() -> None:
    """Each call made room for itself where the one before had put its blocks."""
    tier = HostTier(10 * 8, 8)
    keys, blocks = prefix_keys("", *range(30)), random_blocks(1, 30, 8)
    other = prefix_keys("b", *range(4))
    tier.put_many(keys[:4], blocks[:4])
    tier.put_many(other, blocks[:4])
    for start in range(4, 28, 4):
        tier.put_many(keys[start : start + 4], blocks[start : start + 4])
        assert tier.contains_prefix(keys) == min(start + 4, 10)
    assert tier.contains_prefix(other) == 0  # was used before the rest of the prefix
    assert np.array_equal(get(tier, keys, 8), blocks[:10])
    assert (tier.stats.written_blocks, tier.stats.evicted_blocks, tier.stats.dropped_blocks) == (14, 4, 18)
    tier.put_many(other[:3], blocks[:3])
    assert np.array_equal(get(tier, keys, 8), blocks[:7])


def test_known_blocks_of_a_prefix_do_not_make_room_for_the_rest_of_it() -> None:
    """They did where they had been used longest ago, and were written again."""
    tier = HostTier(8 * 8, 8)
    keys, blocks = prefix_keys("", *range(6)), random_blocks(1, 6, 8)
    tier.put_many(keys[:2], blocks[:2])
    tier.put_many(prefix_keys("b", *range(6)), blocks)
    tier.put_many(keys, blocks)
    assert tier.contains_prefix(keys) == 6
    assert (tier.stats.written_blocks, tier.stats.evicted_blocks) == (12, 4)


def test_blocks_that_come_before_those_before_them_make_room_for_themselves() -> None:
    """A pool gives up the last blocks of a prefix first, and what it still has need not be here."""
    tier, keys, blocks = HostTier(6 * 8, 8), prefix_keys("", *range(6)), random_blocks(1, 6, 8)
    tier.put_many(prefix_keys("b", *range(6)), blocks)
    for start in range(5, -1, -1):
        tier.put_many(keys[start : start + 1], blocks[start : start + 1])
        assert np.array_equal(get(tier, keys[start:], 8), blocks[start:])


@pytest.mark.parametrize("is_put_again", [True, False])
def test_what_is_put_again_or_used_is_not_written_again_and_makes_room_later(is_put_again: bool) -> None:
    tier = HostTier(4 * 8, 8)
    first, second, third = (prefix_keys(name, 1, 2) for name in ("a", "b", "c"))
    blocks = random_blocks(1, 4, 8)
    tier.put_many(first, blocks[:2])
    tier.put_many(second, blocks[2:])
    if is_put_again:
        tier.put_many(first, blocks[2:])
    else:
        tier.mark_used(first)
    tier.put_many(third, blocks[2:])
    assert np.array_equal(get(tier, first, 8), blocks[:2])
    assert tier.contains_prefix(second) == 0


def test_reads_and_writes_of_a_host_tier_are_counted() -> None:
    tier, keys = HostTier(4 * 8, 8), prefix_keys("", *range(4))
    with mock.patch.object(host_tier, "time", mock.Mock(monotonic=mock.Mock(side_effect=count(1.0, 0.5)))):
        tier.put_many(keys[:2], random_blocks(1, 2, 8))
        tier.put_many(keys[:3], random_blocks(1, 3, 8))
        assert len(get(tier, keys, 8)) == 3
    assert tier.stats == StoreStats(
        hit_blocks=3,
        missed_blocks=1,
        read_bytes=24,
        read_seconds=0.5,
        written_blocks=3,
        written_bytes=24,
        write_seconds=1.0,
    )


def test_keys_that_a_host_keeps_do_not_keep_those_before_them() -> None:
    """A key is made anew for each look-up of a prefix that was not used lately, with all keys before it."""
    tier = HostTier(8, 8)
    keys = prefix_keys("", *range(6))
    tier.put_many(keys[5:], np.zeros((1, 8), np.uint8))
    assert tier.contains_prefix(keys[5:]) == 1
    assert all(key.parent is None for _, key in tier._entries.values())


def test_what_a_host_has_is_read_while_something_is_put() -> None:
    """Memory that is fresh comes page by page, and loads waited for it as long."""
    tier = HostTier(4 * 8, 8)
    there, new = prefix_keys("a", 1), prefix_keys("b", 1)
    tier.put_many(there, np.full((1, 8), 7, np.uint8))
    out = np.zeros((1, 8), np.uint8)

    class SlowBlock:
        def __array__(self, dtype: object = None, copy: object = None) -> NDArray[np.uint8]:
            reader = threading.Thread(target=tier.get_many, args=(there, out), daemon=True)
            reader.start()
            reader.join(60)
            return np.full(8, 9, np.uint8)

    class SlowBlocks(np.ndarray[Any, Any]):
        def __iter__(self) -> Iterator[SlowBlock]:
            yield SlowBlock()

    tier.put_many(new, np.empty((1, 8), np.uint8).view(SlowBlocks))
    assert out.tolist() == [[7] * 8]
    assert tier.get_many(new, out) == 1
    assert out.tolist() == [[9] * 8]


def test_a_namespace_of_a_host_is_cleared_alone_and_the_rest_at_the_end() -> None:
    tier = HostTier(4 * 8, 8)
    first, second = (prefix_keys(name, 1, 2) for name in ("a", "b"))
    for keys in (first, second):
        tier.put_many(keys, np.zeros((2, 8), np.uint8))
    tier.clear(first[0].namespace)
    assert tier.flush(0.0) is True
    assert (tier.contains_prefix(first), tier.contains_prefix(second)) == (0, 2)
    tier.close()
    assert tier.contains_prefix(second) == 0


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (2, 8)])
def test_blocks_of_another_size_cost_a_host_no_room(shape: tuple[int, int]) -> None:
    """The row that was to take such a block was lost, and one byte would have filled it."""
    tier = HostTier(8, 8)
    keys = prefix_keys("a", 1)
    with pytest.raises(ValueError, match=r"^blocks: expected contiguous bytes of shape \(1, 8\), got uint8 \("):
        tier.put_many(keys, np.zeros(shape, np.uint8))
    with pytest.raises(ValueError, match=r"^blocks: expected contiguous bytes of shape \(1, 8\), got uint8 \("):
        tier.get_many(keys, np.zeros(shape, np.uint8))
    tier.put_many(keys, np.full((1, 8), 7, np.uint8))
    assert tier.contains_prefix(keys) == 1


@pytest.mark.parametrize("cleared", [False, True])
def test_a_block_that_is_being_read_on_the_host_is_not_overwritten(
    monkeypatch: pytest.MonkeyPatch, cleared: bool
) -> None:
    """Whatever is put, or cleared, while it is copied."""
    tier = HostTier(3 * 8, 8)
    read, other, new = prefix_keys("a", 1), prefix_keys("b", 1), prefix_keys("c", 1, 2, 3)
    tier.put_many(read, np.full((1, 8), 7, np.uint8))
    tier.put_many(other, np.full((1, 8), 8, np.uint8))
    copy = np.take

    def put_and_copy(*arguments: Any, **options: Any) -> None:
        monkeypatch.undo()
        if cleared:
            tier.clear()
        tier.put_many(new, np.full((3, 8), 9, np.uint8))
        copy(*arguments, **options)

    monkeypatch.setattr(np, "take", put_and_copy)
    out = np.zeros((1, 8), np.uint8)
    assert tier.get_many(read, out) == 1
    assert out.tolist() == [[7] * 8]
    assert tier.stats.dropped_blocks == 1
    assert tier.contains_prefix(read) == (not cleared)
    tier.put_many(new, np.full((3, 8), 9, np.uint8))
    assert tier.contains_prefix(new) == 3
    assert tier.contains_prefix(read) == 0


def test_nothing_is_put_behind_a_block_that_had_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was being read made no room for the one block, but for the next, which is not found without it."""
    tier, copies, goes_on = HostTier(8, 8), threading.Event(), threading.Event()
    there, new = prefix_keys("a", 1), prefix_keys("b", 1, 2)
    tier.put_many(there, np.full((1, 8), 7, np.uint8))
    copy = np.take

    def copy_late(*arguments: Any, **options: Any) -> None:
        copies.set()
        assert goes_on.wait(600)
        copy(*arguments, **options)

    class Blocks(np.ndarray[Any, Any]):
        def __iter__(self) -> Iterator[NDArray[np.uint8]]:
            yield np.full(8, 8, np.uint8)
            goes_on.set()
            reader.join(600)
            yield np.full(8, 9, np.uint8)

    monkeypatch.setattr(np, "take", copy_late)
    reader = threading.Thread(target=tier.get_many, args=(there, np.zeros((1, 8), np.uint8)), daemon=True)
    reader.start()
    assert copies.wait(600)
    tier.put_many(new, np.empty((2, 8), np.uint8).view(Blocks))
    goes_on.set()
    reader.join(600)
    assert [tier.contains_prefix(keys) for keys in (there, new[1:])] == [1, 0]
    assert tier.stats.dropped_blocks == 2
