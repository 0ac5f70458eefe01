"""What is cleared while a disk fails, hangs or is gone does not come back with it."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
import tempfile
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, SLOT, OpenTier, bytes_of_blocks_in, index_of, mount, pin_of, put, unmount
from support.faulty_os import FaultyOs
from support.tier_model import FORMAT, FakeClock, get, prefix_keys

from radixkv.tiers.disk import slot_files, store_writer
from radixkv.tiers.disk.open_store import OpenStore
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import IndexedPin, SlotIndex
from radixkv.tiers.disk.store_writer import StoreWriter
from radixkv.tiers.disk_tier import DiskTier


@pytest.mark.parametrize("everything", [False, True], ids=["a namespace", "everything"])
@pytest.mark.parametrize("afterwards", ["put", "close"])
def test_what_is_cleared_while_the_disk_fails_is_overwritten_when_it_is_back(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, everything: bool, afterwards: str
) -> None:
    """A store given up after a failure used to have nothing to overwrite when it was opened anew."""
    other = prefix_keys("b", 1, 2)
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk:
        tier = open_tier()
        put(tier)
        assert bytes_of_blocks_in(tmp_path) == 6
        disk.fault = "write fails"
        put(tier, other, BLOCKS[:2])
        disk.fault = "none"
        tier.clear(None if everything else KEYS[0].namespace)
        clock.now += 60
        if afterwards == "put":
            put(tier, other, np.zeros_like(BLOCKS[:2]))
            assert tier.contains_prefix(other) == 2
            assert bytes_of_blocks_in(tmp_path) == 0
        tier.close()
        assert bytes_of_blocks_in(tmp_path) == 0
        again = open_tier()
        assert again.contains_prefix(KEYS) == 0


@pytest.mark.parametrize("afterwards", ["put", "close"])
def test_what_is_cleared_just_before_the_disk_fails_is_overwritten_when_it_is_back(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, afterwards: str
) -> None:
    tier, bob, zeros = open_tier(), prefix_keys("bob", 1, 2), np.zeros_like(BLOCKS[:2])
    put(tier)
    put(tier, bob[:1], zeros[:1])

    def clear_and_fail(*arguments: Any) -> None:
        tier.clear(KEYS[0].namespace)
        raise OSError(errno.EIO, "planted")

    with mock.patch.object(SlotFiles, "write", clear_and_fail):
        put(tier, bob, zeros)
    clock.now += 60
    if afterwards == "put":
        put(tier, bob, zeros)
        assert tier.contains_prefix(bob) == 2
    else:
        tier.close()
    assert bytes_of_blocks_in(tmp_path) == 0


@pytest.mark.parametrize("afterwards", ["put", "close"])
def test_space_that_a_failing_disk_did_not_give_back_is_given_back_when_it_works(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, afterwards: str
) -> None:
    """It counted as given back, and what was cleared stayed in it for good."""
    tier = open_tier()
    put(tier)
    with mock.patch.object(os, "truncate", side_effect=OSError(errno.EIO, "planted")):
        tier.clear()
        assert tier.flush(600)
    assert bytes_of_blocks_in(tmp_path) == 6
    clock.now += 60
    if afterwards == "put":
        put(tier, prefix_keys("bob", 1), np.zeros_like(BLOCKS[:1]))
    else:
        tier.close()
    assert bytes_of_blocks_in(tmp_path) == 0


def test_space_of_several_files_that_a_disk_twice_fails_to_give_back_is_given_back(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the first file had new blocks, what had been cleared stayed in the others."""
    monkeypatch.setattr(slot_files, "FILE_BYTES", 2 * SLOT)
    tier, bob = open_tier(), prefix_keys("bob", 1)
    put(tier)
    with mock.patch.object(os, "truncate", side_effect=OSError(errno.EIO, "planted")):
        tier.clear()
        assert tier.flush(600)
        clock.now += 60
        put(tier, bob, np.zeros_like(BLOCKS[:1]))
    assert tier.contains_prefix(bob) == 1
    assert bytes_of_blocks_in(tmp_path) == 4
    clock.now += 60
    put(tier, prefix_keys("eve", 1), np.zeros_like(BLOCKS[:1]))
    assert bytes_of_blocks_in(tmp_path) == 0


def test_what_a_killed_process_did_not_overwrite_is_given_back_when_everything_is_cleared(
    open_tier: OpenTier, tmp_path: Path
) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    index = index_of(tmp_path)
    index.clear(KEYS[0].namespace)
    index.close()
    tier = open_tier()
    assert (len(tier), bytes_of_blocks_in(tmp_path)) == (0, 6)
    tier.clear()
    assert tier.flush(600)
    assert bytes_of_blocks_in(tmp_path) == 0


def test_what_was_written_over_other_blocks_before_the_disk_failed_is_overwritten_once_it_is_cleared(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path
) -> None:
    """The index still gave its slots to those others, so that it stayed."""
    tier = open_tier(capacity_bytes=8 * SLOT)
    bob = prefix_keys("bob", *range(8))
    put(tier, bob, np.zeros((8, FORMAT.block_bytes), np.uint8))
    with mock.patch.object(SlotIndex, "commit", side_effect=sqlite3.OperationalError("disk I/O error")):
        put(tier)
    assert bytes_of_blocks_in(tmp_path) == 6
    clock.now += 60
    tier.clear(KEYS[0].namespace)
    assert tier.flush(600)
    assert bytes_of_blocks_in(tmp_path) == 0
    assert tier.contains_prefix(bob) == 2


@pytest.mark.parametrize("cleared", ["before a write", "after a write"])
def test_what_is_cleared_while_its_mount_is_gone_does_not_come_back(
    tmp_path: Path, clock: FakeClock, cleared: str
) -> None:
    """A store in the empty mount point was cleared instead, and what had been cleared was found once the disk was back."""
    point = tmp_path / "point"
    bob = prefix_keys("bob", 1)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        assert os.stat(mounted).st_dev != os.stat(tmp_path).st_dev
        point.symlink_to(mounted)
        with closing(DiskTier(point, FORMAT, capacity_bytes=64 * SLOT, clock=clock)) as tier:
            put(tier)
            point.unlink()
            point.mkdir()
            if cleared == "after a write":
                put(tier, bob, BLOCKS[:1])
            tier.clear(KEYS[0].namespace)
            clock.now += 60
            put(tier, bob, BLOCKS[:1])
            assert not [*point.iterdir()]
            point.rmdir()
            point.symlink_to(mounted)
            clock.now += 60
            put(tier, bob, BLOCKS[:1])
            assert tier.contains_prefix(bob) == 1
            assert tier.contains_prefix(KEYS) == 0
        with closing(DiskTier(point, FORMAT, capacity_bytes=64 * SLOT, clock=clock)) as tier:
            assert tier.contains_prefix(bob) == 1
            assert tier.contains_prefix(KEYS) == 0


@pytest.mark.parametrize("written", [False, True], ids=["closed at once", "written first"])
def test_what_is_cleared_after_its_disk_came_into_place_is_cleared_there(
    open_tier: OpenTier, tmp_path: Path, written: bool
) -> None:
    """It was cleared in the folder that had been open, which was in use no more."""
    tier = open_tier()
    put(tier)
    tier.close()
    unmount(tmp_path)
    tier = open_tier()
    mount(tmp_path)
    tier.clear(KEYS[0].namespace)
    assert open_tier(read_only=True).contains_prefix(KEYS) == 0  # as soon as `clear` returns
    if written:
        put(tier, prefix_keys("bob", 1), BLOCKS[:1])
        assert tier.contains_prefix(KEYS) == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


def test_what_is_cleared_when_a_disk_comes_into_place_during_a_batch_is_cleared_there(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    unmount(tmp_path)
    tier = open_tier()
    monkeypatch.setattr(store_writer, "_CLEAR_SECONDS", 0.0)  # this thread writes, and cannot be waited for
    write = SlotFiles.write

    def mount_and_clear(*arguments: Any) -> None:
        write(*arguments)
        mount(tmp_path)
        tier.clear(KEYS[0].namespace)

    with mock.patch.object(SlotFiles, "write", mount_and_clear):
        put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    clock.now += 60
    put(tier, prefix_keys("bob", 2), BLOCKS[:1])
    assert tier.contains_prefix(KEYS) == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


def test_clearing_waits_for_a_store_that_is_being_opened(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store in its place had been given up, and clearing returned before what came into that place was cleared."""
    root = tmp_path / "store"
    tier = open_tier()
    put(tier)
    shutil.copytree(root, tmp_path / "copy")
    root.rename(tmp_path / "unmounted")
    (tmp_path / "copy").rename(root)
    opens, cleared, goes_on = threading.Event(), threading.Event(), threading.Event()
    clear, open_store = StoreWriter._clear, StoreWriter._open

    def open_late(writer: StoreWriter) -> OpenStore:
        opens.set()
        assert goes_on.wait(600)
        return open_store(writer)

    def clear_meanwhile(writer: StoreWriter, done: threading.Event) -> None:
        assert opens.wait(600)
        clear(writer, done)
        cleared.set()

    monkeypatch.setattr(StoreWriter, "_open", open_late)
    monkeypatch.setattr(StoreWriter, "_clear", clear_meanwhile)
    engine = threading.Thread(target=tier.clear, args=(KEYS[0].namespace,))
    engine.start()
    assert cleared.wait(600)
    engine.join(0.1)
    waits = engine.is_alive()
    goes_on.set()
    engine.join()
    assert waits
    assert open_tier(read_only=True).contains_prefix(KEYS) == 0


def test_what_was_cleared_while_the_disk_was_gone_is_not_there_when_it_is_back(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path
) -> None:
    tier = open_tier()
    put(tier)
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    tier.close()
    with mock.patch("radixkv.tiers.disk.open_store.FolderLock", side_effect=OSError("gone")):
        tier = open_tier()
        tier.clear(KEYS[0].namespace)
    clock.now += 60
    put(tier, prefix_keys("eve", 1), BLOCKS[:1])
    assert tier.contains_prefix(KEYS) == 0
    assert tier.contains_prefix(prefix_keys("bob", 1)) == tier.contains_prefix(prefix_keys("eve", 1)) == 1
    assert bytes_of_blocks_in(tmp_path) == 1  # theirs


@pytest.mark.parametrize("hanging", ["commit", "clear"])
def test_clearing_does_not_wait_for_a_disk_that_hangs(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, hanging: str
) -> None:
    """The engine's thread used to wait for as long as a transaction of the index hung."""
    tier = open_tier()
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    hangs, answers = threading.Event(), threading.Event()
    real = getattr(SlotIndex, hanging)

    def hang(*arguments: Any) -> None:
        hangs.set()
        assert answers.wait(600)
        real(*arguments)

    monkeypatch.setattr(SlotIndex, hanging, hang)
    if hanging == "clear":
        put(tier)
    else:
        tier.put_many(KEYS, BLOCKS)
        assert hangs.wait(600)
    monkeypatch.setattr(store_writer, "_CLEAR_SECONDS", 0.0)
    engine = threading.Thread(target=tier.clear, args=(KEYS[0].namespace,))
    engine.start()
    engine.join(20)
    waited = engine.is_alive()
    found = tier.contains_prefix(KEYS)
    answers.set()
    engine.join()
    assert not waited
    assert "a restart before it does would find what was cleared" in caplog.text
    assert not found
    assert tier.flush(600)
    assert tier.contains_prefix(KEYS) == 0
    put(tier, KEYS[:2], BLOCKS[:2])
    tier.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 2  # what was put after the clearing
    assert tier.contains_prefix(prefix_keys("bob", 1)) == 1


def test_what_is_cleared_while_a_disk_comes_back_is_not_found(
    open_tier: OpenTier, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier()
    put(tier)
    tier.pins.add(pin_of(KEYS[0]))
    tier.close()
    with mock.patch("radixkv.tiers.disk.open_store.FolderLock", side_effect=OSError("gone")):
        tier = open_tier()

    load = tier.pins.load

    def load_and_clear(pins: Sequence[IndexedPin]) -> None:
        load(pins)
        assert tier.pins.waiting()
        tier.clear(KEYS[0].namespace)

    monkeypatch.setattr(store_writer, "_CLEAR_SECONDS", 0.0)
    clock.now += 60
    with mock.patch.object(tier.pins, "load", load_and_clear):
        put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    for _ in range(2):
        assert len(tier) == tier.contains_prefix(prefix_keys("bob", 1)) == 1
        assert not tier.pins.waiting()
        tier.close()
        tier = open_tier()


def test_what_is_put_after_everything_was_cleared_while_a_disk_comes_back_stays(
    open_tier: OpenTier, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots were given back once more behind it, and then to other blocks, too."""
    tier = open_tier()
    put(tier)
    tier.close()
    with mock.patch("radixkv.tiers.disk.open_store.FolderLock", side_effect=OSError("gone")):
        tier = open_tier()

    load, later = tier.pins.load, prefix_keys("bob", 1, 2)

    def load_clear_and_put(pins: Sequence[IndexedPin]) -> None:
        load(pins)
        tier.clear()
        tier.put_many(later, BLOCKS[:2])

    monkeypatch.setattr(store_writer, "_CLEAR_SECONDS", 0.0)
    clock.now += 60
    with mock.patch.object(tier.pins, "load", load_clear_and_put):
        put(tier, prefix_keys("eve", 1), BLOCKS[:1])
    assert tier.flush(600)
    assert tier.contains_prefix(KEYS) == 0
    assert np.array_equal(get(tier, later), BLOCKS[:2])
