"""What makes room on a disk: what was used longest ago, and of a prefix its last blocks."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, SLOT, OpenTier, index_of, put, slot_file
from support.tier_model import get, prefix_keys, random_blocks

from radixkv.tiers.disk import slot_files
from radixkv.tiers.disk.maintenance import Verification, verify


@pytest.mark.parametrize("full", [False, True])
def test_what_made_room_for_a_block_that_was_not_kept_is_not_in_the_index(
    open_tier: OpenTier, tmp_path: Path, full: bool
) -> None:
    """It used to stay there, with a slot that held something else by then."""
    tier = open_tier(capacity_bytes=6 * SLOT)
    put(tier)
    real = slot_files.SlotFiles.write

    def write(files: Any, first: int, buffers: Any) -> None:
        real(files, first, buffers)
        if len(buffers) > 1:
            if full:
                raise OSError(28, "no space left")
            tier.clear(other[0].namespace)

    other = prefix_keys("bob", 1, 2)
    with mock.patch.object(slot_files.SlotFiles, "write", write):
        put(tier, other, BLOCKS[:2])
    tier.close()
    (folder,) = tmp_path.glob("store/*")
    assert verify(folder) == Verification(right=4, corrupt=0, replaced=0)


def test_the_least_recently_used_make_room_and_tails_go_before_heads(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=8 * SLOT)
    old, used = prefix_keys("a", 1, 2, 3, 4), prefix_keys("b", 1, 2, 3, 4)
    put(tier, used, BLOCKS[:4])
    put(tier, old, BLOCKS[:4])
    assert len(get(tier, used)) == 4
    tier.mark_used(used)
    put(tier, prefix_keys("c", 1, 2), BLOCKS[:2])
    assert tier.contains_prefix(used) == 4
    assert tier.contains_prefix(old) == 2
    assert tier.stats.evicted_blocks == 2
    tier.close()
    tier = open_tier(capacity_bytes=8 * SLOT)  # when each was used is remembered
    put(tier, prefix_keys("d", 1, 2), BLOCKS[:2])
    assert tier.contains_prefix(old) == 0
    assert tier.contains_prefix(used) == 4


def test_the_last_blocks_of_a_prefix_make_room_first_after_a_restart_wherever_they_are(open_tier: OpenTier) -> None:
    """All had been used at the same time; those in the last slots were evicted, without which the others are not found."""
    tier = open_tier(capacity_bytes=8 * SLOT)
    first, prefix = prefix_keys("a", *range(4)), prefix_keys("b", *range(8))
    put(tier, first, BLOCKS[:4])
    put(tier, prefix[:4], BLOCKS[:4])
    tier.clear(first[0].namespace)
    put(tier, prefix, random_blocks(1, 8))  # the rest of it takes the first slots
    tier.close()
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, prefix_keys("c", 1), BLOCKS[:1])
    assert tier.contains_prefix(prefix) == 7


def test_blocks_used_before_the_clock_was_set_back_are_evicted_like_others(open_tier: OpenTier, tmp_path: Path) -> None:
    """They counted as used last after each restart, until the clock had caught up."""
    old, used = prefix_keys("a", *range(4)), prefix_keys("b", *range(4))
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, old, BLOCKS[:4])
    tier.close()
    index = index_of(tmp_path)
    index.commit([], [(4e9, row.slot) for row in index.all()], [])
    index.close()
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, used, BLOCKS[:4])
    tier.close()
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, prefix_keys("c", 1, 2), BLOCKS[:2])
    assert tier.contains_prefix(used) == 4
    assert tier.contains_prefix(old) == 2


def test_a_prefix_longer_than_a_batch_keeps_its_head_longest(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=64 * SLOT)
    keys = prefix_keys("", *range(64))
    put(tier, keys, random_blocks(1, 64))
    put(tier, prefix_keys("b", *range(10)), random_blocks(2, 10))
    assert tier.contains_prefix(keys) == 54


def test_of_a_prefix_longer_than_the_store_the_head_is_kept(open_tier: OpenTier) -> None:
    """Each batch of it made room for the next, and of the rest nothing could be found."""
    tier = open_tier(capacity_bytes=40 * SLOT)
    keys, blocks = prefix_keys("", *range(80)), random_blocks(1, 80)
    put(tier, keys[:10], blocks[:10])
    put(tier, keys, blocks)
    assert np.array_equal(get(tier, keys), blocks[:40])
    assert tier.stats.dropped_blocks == 40
    put(tier, prefix_keys("b", *range(3)), BLOCKS[:3])
    assert np.array_equal(get(tier, keys), blocks[:37])


@pytest.mark.parametrize("restarts", [False, True])
def test_of_a_prefix_that_is_put_in_several_calls_the_head_is_kept(open_tier: OpenTier, restarts: bool) -> None:
    """Each call made room for itself where the one before had put its blocks."""
    tier = open_tier(capacity_bytes=10 * SLOT)
    keys, blocks = prefix_keys("", *range(30)), random_blocks(1, 30)
    other = prefix_keys("b", *range(4))
    put(tier, keys[:4], blocks[:4])
    put(tier, other, BLOCKS[:4])
    for start in range(4, 28, 4):
        if restarts:
            tier.close()
            tier = open_tier(capacity_bytes=10 * SLOT)
        put(tier, keys[start : start + 4], blocks[start : start + 4])
        assert tier.contains_prefix(keys) == min(start + 4, 10)
    assert tier.contains_prefix(other) == 0  # was used before the rest of the prefix
    assert np.array_equal(get(tier, keys), blocks[:10])


def test_of_a_prefix_that_was_put_in_several_calls_the_tail_makes_room_first(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=10 * SLOT)
    keys, blocks = prefix_keys("", *range(10)), random_blocks(1, 10)
    put(tier, keys[:4], blocks[:4])
    put(tier, keys[4:], blocks[4:])
    put(tier, prefix_keys("b", *range(3)), BLOCKS[:3])
    assert np.array_equal(get(tier, keys), blocks[:7])


def test_the_rest_of_a_prefix_that_fills_the_store_does_not_keep_others_out(open_tier: OpenTier) -> None:
    """In one batch with it, blocks of others were dropped, too: all that could have made room for them was before it."""
    tier, let_go = open_tier(capacity_bytes=8 * SLOT), threading.Event()
    keys, blocks, other = prefix_keys("", *range(12)), random_blocks(1, 12), prefix_keys("b", 1)
    put(tier, keys[:8], blocks[:8])
    assert tier._writer is not None
    tier._writer._writer.call(mock.Mock(side_effect=let_go.wait))
    tier.put_many(keys[8:], blocks[8:])
    tier.put_many(other, BLOCKS[:1])
    let_go.set()
    assert tier.flush(600)
    assert (tier.contains_prefix(keys), tier.contains_prefix(other)) == (7, 1)


def test_slots_that_make_room_are_written_in_one_call(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=6 * SLOT)
    put(tier)
    with mock.patch.object(slot_files.SlotFiles, "write", autospec=True) as write:
        put(tier, prefix_keys("bob", *range(6)))
    assert write.call_count == 1


def test_known_blocks_of_a_prefix_do_not_make_room_for_the_rest_of_it(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, KEYS[:2], BLOCKS[:2])
    put(tier, prefix_keys("b", *range(6)), BLOCKS)
    put(tier)
    assert tier.contains_prefix(KEYS) == 6


def test_known_blocks_do_not_make_room_while_the_rest_of_their_prefix_waits(open_tier: OpenTier) -> None:
    """Nor do those that are put again, though nothing of them is written."""
    tier, let_go = open_tier(capacity_bytes=8 * SLOT), threading.Event()
    put(tier, KEYS[:2], BLOCKS[:2])
    put(tier, prefix_keys("b", *range(6)), BLOCKS)
    assert tier._writer is not None
    tier._writer._writer.call(mock.Mock(side_effect=let_go.wait))
    tier.put_many(prefix_keys("c", *range(4)), BLOCKS[:4])
    tier.put_many(KEYS[:2], BLOCKS[:2])
    let_go.set()
    assert tier.flush(600)
    assert tier.contains_prefix(KEYS) == 2


def test_a_smaller_capacity_keeps_what_was_used_last_and_gives_space_back(open_tier: OpenTier, tmp_path: Path) -> None:
    """It kept what was in the first slots."""
    old, new = (prefix_keys(name, *range(4)) for name in ("old", "new"))
    tier = open_tier()
    put(tier, old, BLOCKS[:4])
    put(tier, new, BLOCKS[2:])
    tier.close()
    for _ in range(2):
        tier = open_tier(capacity_bytes=4 * SLOT)
        assert slot_file(tmp_path).stat().st_size == 4 * SLOT
        assert tier.contains_prefix(old) == 0
        assert np.array_equal(get(tier, new), BLOCKS[2:])
        tier.close()


def test_what_is_put_behind_a_gap_takes_no_room_from_before_it(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=8 * SLOT)
    keys, blocks, other = prefix_keys("", *range(12)), random_blocks(1, 12), prefix_keys("b", *range(4))
    put(tier, keys[:4], blocks[:4])
    put(tier, other, BLOCKS[:4])
    put(tier, keys[6:], blocks[6:])
    assert tier.contains_prefix(keys) == 4
    assert tier.contains_prefix(other) == 0
    assert tier.stats.dropped_blocks == 2


def test_prefixes_that_go_on_in_one_batch_take_no_room_from_before_each_other(open_tier: OpenTier) -> None:
    """Of what has no room behind its own head, nothing is kept: alone, it would be of no use."""
    tier, let_go = open_tier(capacity_bytes=8 * SLOT), threading.Event()
    first, second, other = (prefix_keys(name, *range(6)) for name in ("a", "b", "c"))
    put(tier, first[:4], BLOCKS[:4])
    put(tier, second[:2], BLOCKS[:2])
    put(tier, other[:2], BLOCKS[:2])
    assert tier._writer is not None
    tier._writer._writer.call(mock.Mock(side_effect=let_go.wait))
    tier.put_many(first[4:], BLOCKS[4:])
    tier.put_many(second[2:4], BLOCKS[2:4])
    let_go.set()
    assert tier.flush(600)
    assert [tier.contains_prefix(keys) for keys in (first, second, other)] == [6, 2, 0]
    assert tier.stats.dropped_blocks == 2


def test_nothing_makes_room_for_what_is_behind_a_block_that_had_none(open_tier: OpenTier) -> None:
    """Other prefixes' blocks in the batch gave up theirs in between, and one of these went for a block of no use."""
    tier, let_go = open_tier(capacity_bytes=8 * SLOT), threading.Event()
    first, second = (prefix_keys(name, *range(7)) for name in ("a", "b"))
    put(tier, first[:5], BLOCKS[:5])
    put(tier, second[:3], BLOCKS[:3])
    assert tier._writer is not None
    tier._writer._writer.call(mock.Mock(side_effect=let_go.wait))
    for keys in (first[5:6], second[3:4], first[6:]):
        tier.put_many(keys, BLOCKS[:1])
    let_go.set()
    assert tier.flush(600)
    assert [tier.contains_prefix(keys) for keys in (first, second)] == [5, 3]
    assert tier.stats.dropped_blocks == 3
