"""What makes room in a folder that several machines share: what was used longest ago, and of a prefix its last blocks."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.faulty_os import FaultyOs
from support.tier_model import FORMAT, get, prefix_keys, random_blocks

from radixkv.tiers import folder_blobs
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.shared_tier import SharedTier

FILE = FORMAT.block_bytes + 72


def tier_in(folder: Path, num_blocks: int) -> SharedTier:
    """A tier with room for so many blocks, to be closed by who opens it."""
    return SharedTier(FolderBlobs(folder, capacity_bytes=num_blocks * FILE), FORMAT)


def test_a_folder_is_held_to_its_capacity(tmp_path: Path) -> None:
    size = 6 * (len(BLOCKS[0]) + 72)
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=size), FORMAT)
    put(tier)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    tier.mark_used(KEYS[:2])
    put(tier, KEYS[2:3], BLOCKS[2:3])  # this, too
    put(tier, prefix_keys("bob", 1, 2, 3), BLOCKS[:3])
    assert tier.contains_prefix(prefix_keys("bob", 1, 2, 3)) == 3
    assert tier.contains_prefix(KEYS) == 3
    assert not tier.stats.errors
    assert sum(path.is_file() for path in tmp_path.rglob("*")) <= 6
    tier.close()


@pytest.mark.parametrize("short_writes", [False, True])
def test_a_folder_on_a_disk_with_no_room_beyond_its_capacity_is_cut_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_writes: bool
) -> None:
    """Once the disk was full, each write failed before the folder was measured, even after a restart."""
    capacity = 100_000
    disk_bytes = capacity + 6_000  # less than four processes write between their looks

    def write(file: int, buffers: list[memoryview], offset: int) -> int:
        left = disk_bytes - sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
        if len(buffers[0]) > left:
            if not short_writes:
                raise OSError(errno.ENOSPC, "no space left")
            return os.pwritev(file, [buffers[0][:left]], offset)
        return os.pwritev(file, buffers, offset)

    disk = FaultyOs()
    monkeypatch.setattr(folder_blobs, "os", disk)
    monkeypatch.setattr(disk, "pwritev", write)
    stores = [FolderBlobs(tmp_path, capacity_bytes=capacity) for _ in range(4)]
    for number in range(400):
        name = f"prefix/{number}"
        assert stores[number % 4].write({name: bytes(1000)}) == 1
        assert stores[0].count_present([name]) == 1
    stores.append(FolderBlobs(tmp_path, capacity_bytes=capacity))
    assert stores[-1].write({"prefix/new": bytes(1000)}) == 1
    assert {path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()} == {1000}
    for store in stores:
        store.close()


def test_a_folder_whose_disk_others_fill_loses_nothing(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=10_000)
    store.write({f"prefix/{number}": bytes(1000) for number in range(9)})
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:
        disk.fault = "full"
        with pytest.raises(OSError, match="no space left"):
            store.write({"prefix/new": bytes(1000)})
    assert store.count_present([f"prefix/{number}" for number in range(9)]) == 9
    store.close()


def test_a_full_folder_whose_disk_fails_loses_nothing(tmp_path: Path) -> None:
    names = [f"prefix/{number}" for number in range(9)]
    store = FolderBlobs(tmp_path, capacity_bytes=9_000)
    store.write({name: bytes(1000) for name in names})
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:
        disk.fault = "write fails"
        with pytest.raises(OSError, match="unwritable"):
            store.write({"prefix/new": bytes(1000)})
    assert store.count_present(names) == 9
    store.close()


def test_a_folder_is_measured_a_few_times_while_as_much_as_its_capacity_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may hold millions of files."""
    store, looks = FolderBlobs(tmp_path, capacity_bytes=16_000), mock.Mock()
    monkeypatch.setattr(store, "_cut_down_to", looks)
    for number in range(44):
        store.write({f"prefix/{number}": bytes(500)})
    assert (
        looks.call_args_list == [mock.call(16_000)] * 15
    )  # first at once, then each time that more than 1,000 bytes came
    store.close()


def test_what_is_remembered_of_blocks_that_were_removed_is_bounded(tmp_path: Path) -> None:
    """Which block was before each, while others are behind them."""
    tier = tier_in(tmp_path, 10)
    for number in range(8):
        keys, blocks = prefix_keys(str(number), *range(12)), random_blocks(number, 12)
        for start in range(0, 12, 4):
            put(tier, keys[start : start + 4], blocks[start : start + 4])
    store = tier._store
    assert isinstance(store, FolderBlobs)
    assert 0 < len(store._removed) <= 12
    tier.close()


@pytest.mark.parametrize(("error", "others"), [(errno.ENOSPC, 5_000), (errno.EDQUOT, 1_000_000)])
def test_a_folder_makes_room_on_a_disk_or_within_a_quota_that_is_smaller_than_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int, others: int
) -> None:
    """It used to stay full for good: it held less than its capacity, so nothing was removed."""
    store = FolderBlobs(tmp_path, capacity_bytes=1_000_000)
    used = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # noqa: E731
    write_once = FolderBlobs._write_once

    def write(self: FolderBlobs, path: Path, blob: bytes) -> None:
        if used() + len(blob) > 20_000:
            raise OSError(error, "no space left")
        write_once(self, path, blob)

    monkeypatch.setattr(FolderBlobs, "_write_once", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(used=used() + others))
    for number in range(60):
        store.write({f"prefix/{number}": bytes(1000)})
    assert store.count_present([f"prefix/{number}" for number in range(59, 44, -1)]) == 15
    store.close()


def test_known_blocks_of_a_prefix_do_not_make_room_for_the_rest_of_it(tmp_path: Path) -> None:
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=6 * (len(BLOCKS[0]) + 72)), FORMAT)
    put(tier, KEYS[:1], BLOCKS[:1])
    put(tier, prefix_keys("bob", *range(5)), BLOCKS[:5])
    put(tier, KEYS[:4], BLOCKS[:4])
    assert tier.contains_prefix(KEYS[:4]) == 4
    tier.close()


def test_the_last_blocks_of_a_prefix_that_is_used_make_room_first(tmp_path: Path) -> None:
    """Blocks behind a missing one are of no use."""
    store = FolderBlobs(tmp_path, capacity_bytes=600)
    blobs = {f"prefix/{number}-{number - 1}": bytes(100) for number in range(6)}
    store.write(blobs)
    for use in (lambda: store.write(blobs), lambda: store.mark_used([*blobs])):
        for path in tmp_path.rglob("*"):
            os.utime(path, (0, 0))
        use()
        store.write({f"other/{use}": bytes(100)})
        assert store.count_present([*blobs]) == 5
        store.write(blobs)
    store.close()


def test_the_last_blocks_of_a_prefix_that_was_read_in_parts_make_room_first(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1 << 20)
    tier = SharedTier(store, FORMAT)
    put(tier)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    for start in range(0, 6, 2):
        assert len(get(tier, KEYS[start : start + 2])) == 2
    tier.mark_used(KEYS)
    assert tier.flush(600)
    store._cut_down_to(sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()) - 1)
    assert [tier.contains_prefix([key]) for key in KEYS] == [1, 1, 1, 1, 1, 0]
    tier.close()


def test_blobs_used_when_a_clock_was_ahead_make_room_like_others(tmp_path: Path) -> None:
    """Until all clocks had passed their time, they stayed, and whatever was written was removed again."""
    store = FolderBlobs(tmp_path, capacity_bytes=600)
    old = {f"prefix/{number}": bytes(100) for number in range(6)}
    store.write(old)
    for use in (lambda: store.mark_used([*old]), lambda: store.write({"other/first": bytes(100)})):
        for path in tmp_path.rglob("*"):
            os.utime(path, (4e9, 4e9))
        use()
        store.write({f"other/{use}": bytes(100)})
        assert store.count_present([f"other/{use}"]) == 1
        store.write(old)
    store.close()


def test_of_a_prefix_that_is_put_in_several_calls_the_head_is_kept(tmp_path: Path) -> None:
    """Each call made room for itself where the one before had put its blocks, and in the end nothing was found."""
    tier = tier_in(tmp_path, 10)
    keys, blocks, other = prefix_keys("", *range(30)), random_blocks(1, 30), prefix_keys("b", *range(4))
    put(tier, keys[:4], blocks[:4])
    put(tier, other, BLOCKS[:4])
    for start in range(4, 28, 4):
        put(tier, keys[start : start + 4], blocks[start : start + 4])
        assert tier.contains_prefix(keys) == min(start + 4, 10)
    assert tier.contains_prefix(other) == 0  # was used before the rest of the prefix
    assert np.array_equal(get(tier, keys), blocks[:10])
    put(tier, other, BLOCKS[:4])
    assert (tier.contains_prefix(keys), tier.contains_prefix(other)) == (6, 4)
    tier.close()


def test_of_a_prefix_whose_parts_several_processes_put_the_tail_makes_room_first(tmp_path: Path) -> None:
    """The first part had been used longest ago; without it, the others are not found."""
    tiers = [tier_in(tmp_path, 10) for _ in range(3)]
    keys, other = prefix_keys("a", *range(6)), prefix_keys("b", *range(4))
    put(tiers[0], keys[:3], BLOCKS[:3])
    put(tiers[1], other, BLOCKS[:4])
    put(tiers[2], keys[3:], BLOCKS[3:])
    put(tiers[0], prefix_keys("c", *range(5)), BLOCKS[:5])
    assert (tiers[0].contains_prefix(other), tiers[0].contains_prefix(keys)) == (0, 5)
    for tier in tiers:
        tier.close()


def test_prefixes_that_part_make_room_as_they_were_used(tmp_path: Path) -> None:
    tier = tier_in(tmp_path, 10)
    first, second = prefix_keys("", 1, 2, 3, 4, 5), prefix_keys("", 1, 2, 6, 7, 8)
    put(tier, first, BLOCKS[:5])
    put(tier, second, BLOCKS[:5])
    tier.mark_used(first)
    put(tier, prefix_keys("b", *range(4)), BLOCKS[:4])
    assert (tier.contains_prefix(first), tier.contains_prefix(second)) == (5, 3)
    put(tier, prefix_keys("c", *range(2)), BLOCKS[:2])
    assert (tier.contains_prefix(first), tier.contains_prefix(second)) == (4, 2)
    tier.close()


def test_of_a_prefix_the_head_stays_whichever_blocks_were_used_last(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1000)
    names = ["prefix/head", "prefix/middle-head", "prefix/tail-middle"]
    store.write({name: bytes(100) for name in names})
    for name, used in zip(names, (4, 2, 5), strict=True):
        os.utime(store._path(name), (used, used))
    store._cut_down_to(100)
    assert store.count_present(names) == 1
    store.close()


def test_the_head_of_a_prefix_stays_though_a_block_behind_it_is_missing(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1000)
    names = ["prefix/head", "prefix/middle-head", "prefix/tail-middle"]
    store.write({name: bytes(100) for name in names})
    store.delete([names[1]])
    store.mark_used(names)
    store._cut_down_to(100)
    assert store.count_present(names) == 1
    store.close()


def test_names_that_lead_in_a_circle_are_removed_like_others(tmp_path: Path) -> None:
    """A process that may write to the folder may write anything."""
    store = FolderBlobs(tmp_path, capacity_bytes=200)
    for name in ("a-b", "b-a", "-c", "c-c", "d"):
        store.write({f"prefix/{name}": bytes(100)})
    assert sum(path.is_file() for path in tmp_path.rglob("*")) == 2
    store.close()
