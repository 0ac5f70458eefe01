"""The store on a disk that fails: full, read-only, unreadable, damaged or gone, and back again."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import (
    BLOCKS,
    KEYS,
    SLOT,
    OpenTier,
    bytes_of_blocks_in,
    files_open_in,
    mount,
    pin_of,
    put,
    slot_file,
    unmount,
)
from support.faulty_os import FaultyOs
from support.fifos import not_blocked_by
from support.tier_model import FORMAT, FakeClock, get, prefix_keys

from radixkv.tiers.disk import slot_files, store_folder, store_writer
from radixkv.tiers.disk.maintenance import UnreadableIndexError, Verification, clear, describe, verify
from radixkv.tiers.disk.namespace_secret import namespace_secret
from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import SlotIndex
from radixkv.tiers.disk.stored_pins import StoredPins
from radixkv.tiers.disk_tier import DiskTier


@pytest.fixture
def reads_records() -> None:
    """Read by Python: native code bypasses the module's `os`, which stands for the failing disk."""


@pytest.mark.parametrize("fault", ["write fails", "full", "gone"])
def test_a_disk_that_cannot_be_written_is_warned_of_once_and_tried_again_later(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk, caplog.at_level(logging.WARNING):
        tier = open_tier()
        disk.fault = fault
        for seconds in (0, 0.5, 1, 1.5):
            clock.now += seconds
            put(tier)
        assert tier.contains_prefix(KEYS) == 0
        assert tier.stats.dropped_blocks == 24
        assert 2 <= tier.stats.errors <= 4
        assert len(caplog.records) <= 2  # of writing, and of taking space
        disk.fault = "none"
        put(tier)
        assert tier.contains_prefix(KEYS) == 0  # not yet
        clock.now += 60
        put(tier)
        assert np.array_equal(get(tier, KEYS), BLOCKS)


@pytest.mark.parametrize("failing", ["index", "slots", "quota"])
def test_a_disk_that_is_full_is_not_opened_anew(open_tier: OpenTier, clock: FakeClock, failing: str) -> None:
    """Opening reads the whole index, and finds nothing else there."""
    tier = open_tier()
    if failing == "index":
        fault = mock.patch.object(SlotIndex, "commit", side_effect=index_is_full())
    else:
        code = errno.ENOSPC if failing == "slots" else errno.EDQUOT
        fault = mock.patch.object(SlotFiles, "write", side_effect=OSError(code, os.strerror(code)))
    with fault:
        put(tier)
    clock.now += 60
    with mock.patch.object(store_writer, "open_to_write", side_effect=AssertionError):
        put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)


def index_is_full() -> sqlite3.OperationalError:
    """What SQLite raises."""
    full = sqlite3.OperationalError("database or disk is full")
    full.sqlite_errorcode = sqlite3.SQLITE_FULL
    return full


@pytest.mark.parametrize("everything", [False, True], ids=["a namespace", "everything"])
@pytest.mark.parametrize("failing", ["index", "slots"])
def test_what_a_batch_that_failed_has_written_is_overwritten(
    open_tier: OpenTier,
    clock: FakeClock,
    tmp_path: Path,
    everything: bool,
    failing: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No index had it, so clearing its namespace left it, and so did closing the store."""
    monkeypatch.setattr(slot_files, "CALL_BYTES", 3 * SLOT)
    tier = open_tier()
    put(tier, prefix_keys("bob", 1), np.zeros_like(BLOCKS[:1]))
    write = SlotFiles.write
    if failing == "index":
        fault = mock.patch.object(SlotIndex, "commit", side_effect=index_is_full())
    else:
        answers = iter([write, mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left"))])
        fault = mock.patch.object(SlotFiles, "write", lambda *arguments: next(answers)(*arguments))
    with fault:
        put(tier)
    assert bytes_of_blocks_in(tmp_path) == (6 if failing == "index" else 3)
    clock.now += 60
    tier.clear(None if everything else KEYS[0].namespace)
    assert tier.flush(600)
    assert bytes_of_blocks_in(tmp_path) == 0
    assert len(get(tier, prefix_keys("bob", 1))) == (not everything)


def test_a_disk_that_is_full_later_keeps_what_it_has_and_makes_room_there(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk, mock.patch.object(slot_files, "FILE_BYTES", 4 * SLOT):
        tier = open_tier()
        put(tier, KEYS[:4], BLOCKS[:4])
        with mock.patch.object(disk, "posix_fallocate", side_effect=OSError(28, "no space left")):
            other = prefix_keys("b", 1, 2)
            put(tier, other, BLOCKS[:2])
            assert np.array_equal(get(tier, other), BLOCKS[:2])
            assert tier.contains_prefix(KEYS) == 2
        clock.now += 60
        put(tier)
        assert tier.contains_prefix(KEYS) == 6
        assert tier.contains_prefix(other) == 2
    assert [message.startswith("taking more space for ") for message in caplog.messages] == [True, True]
    assert caplog.messages[-1].endswith(": works again")


def test_space_that_a_full_disk_gave_in_part_is_given_back(open_tier: OpenTier, tmp_path: Path) -> None:
    def give_half(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(28, "no space left")

    with mock.patch.object(os, "posix_fallocate", give_half):
        tier = open_tier()
        put(tier)
        assert tier.contains_prefix(KEYS) == 0
        assert slot_file(tmp_path).stat().st_size == 0


def test_a_block_that_cannot_be_read_is_a_miss_and_the_disk_is_spared(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk, caplog.at_level(logging.WARNING):
        tier = open_tier()
        put(tier)
        disk.fault = "read fails"
        assert len(get(tier, KEYS)) == len(get(tier, KEYS)) == 0
        assert tier.stats.errors == 1
        assert len(caplog.records) == 1
        disk.fault = "none"
        assert tier.contains_prefix(KEYS) == 0
        clock.now += 1
        assert tier.contains_prefix(KEYS[1:]) == 5  # the first may lie on a bad sector
        assert np.array_equal(get(tier, KEYS[1:]), BLOCKS[1:])


def test_a_disk_of_which_a_part_cannot_be_read_is_not_logged_as_working_again(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Each call that read only some of its blocks used to log a warning, and then that the disk works again."""
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk, mock.patch.object(slot_files, "FILE_BYTES", 4 * SLOT):
        tier = open_tier()
        put(tier)

        def read_the_first_file(descriptor: int, buffers: list[memoryview], offset: int) -> int:
            if os.readlink(f"/proc/self/fd/{descriptor}").endswith("blocks-00000"):
                return os.preadv(descriptor, buffers, offset)
            raise OSError(5, "unreadable")

        with mock.patch.object(disk, "preadv", read_the_first_file):
            for _ in range(2):
                assert np.array_equal(get(tier, KEYS), BLOCKS[:4])
                put(tier)
                clock.now += 60
        assert [record.getMessage().partition(": ")[2][:10] for record in caplog.records] == ["[Errno 5] "]
        assert np.array_equal(get(tier, KEYS), BLOCKS)
        assert "works again" in caplog.text


def test_what_a_disk_has_is_read_while_it_cannot_be_written_and_found_when_it_can(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock
) -> None:
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk:
        tier = open_tier()
        put(tier)
        other = prefix_keys("bob", 1)
        disk.fault = "write fails"
        for _ in range(2):
            put(tier, other, BLOCKS[:1])
            assert np.array_equal(get(tier, KEYS), BLOCKS)
            assert not files_open_in(tmp_path)  # so that a disk can be unmounted
            clock.now += 60
        disk.fault = "none"
        put(tier, other, BLOCKS[:1])
        assert np.array_equal(get(tier, other), BLOCKS[:1])
        assert np.array_equal(get(tier, KEYS), BLOCKS)


def test_a_disk_that_was_gone_is_used_again_with_whatever_it_has(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock
) -> None:
    """What was open used to be kept: nothing was stored until a restart, or it was stored where it would not be found."""
    tier, reader = open_tier(), open_tier(read_only=True)
    put(tier)
    tier.pins.add(pin_of(KEYS[0]))
    assert tier.flush(600)
    assert np.array_equal(get(reader, KEYS), BLOCKS)
    unmount(tmp_path)
    other = prefix_keys("bob", 1, 2)
    put(tier, other, BLOCKS[:2])
    assert tier.stats.errors == tier.stats.dropped_blocks == 0
    assert tier.contains_prefix(KEYS) == 0
    assert not tier.pins.waiting()  # it is in force
    clock.now += 60  # the reader looks again
    for each in (tier, reader):
        assert np.array_equal(get(each, other), BLOCKS[:2])
    tier.close()
    assert np.array_equal(get(open_tier(), other), BLOCKS[:2])


def test_a_batch_that_failed_costs_no_block_of_another_disk_in_its_place(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock
) -> None:
    """The slots that it was to have were emptied there."""
    tier = open_tier()
    put(tier)
    tier.close()
    unmount(tmp_path)
    other = prefix_keys("bob", *range(6))
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk:
        tier = open_tier()
        disk.fault = "write fails"
        put(tier, other)
    mount(tmp_path)
    clock.now += 60
    put(tier, other)
    for _ in range(2):
        assert np.array_equal(get(tier, KEYS), BLOCKS)
        assert np.array_equal(get(tier, other), BLOCKS)
        tier.close()
        tier = open_tier()


def test_a_batch_is_written_into_a_folder_that_was_emptied_before(open_tier: OpenTier, tmp_path: Path) -> None:
    """It was dropped: all of what is written at the end of a process could be one batch."""
    tier = open_tier()
    put(tier)
    shutil.rmtree(tmp_path / "store")
    put(tier, prefix_keys("bob", *range(6)))
    tier.close()
    assert open_tier().contains_prefix(prefix_keys("bob", *range(6))) == 6


def test_a_folder_that_was_emptied_gets_its_secret_back(open_tier: OpenTier, tmp_path: Path) -> None:
    """What was written from then on was under a secret that the next start did not find, as nothing held it any more."""
    root = tmp_path / "store"
    secret = namespace_secret(root)
    tier = open_tier(secret=secret)
    put(tier)
    shutil.rmtree(root)
    put(tier, prefix_keys("bob", *range(6)))
    assert namespace_secret(root) == secret
    assert tier.contains_prefix(prefix_keys("bob", *range(6))) == 6


def test_a_disk_that_is_mounted_late_is_not_written_under_another_secret(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor did the next start find that: it took the disk's own."""
    root = tmp_path / "store"
    tier = open_tier(secret=namespace_secret(root))
    put(tier, KEYS[:2], BLOCKS[:2])
    root.rename(tmp_path / "mount point")
    theirs = namespace_secret(root)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            put(tier)
            clock.now += 60
    (record,) = caplog.records
    assert "another folder, with another secret, is in its place; start again" in record.getMessage()
    assert (namespace_secret(root), [*root.iterdir()]) == (theirs, [root / "namespaces.secret"])
    shutil.rmtree(root)
    (tmp_path / "mount point").rename(root)
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)


def test_a_process_that_only_reads_warns_of_another_secret(
    open_tier: OpenTier, tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It found nothing any more, without a word."""
    root = tmp_path / "store"
    secret = namespace_secret(root)
    put(open_tier(secret=secret))
    reader = open_tier(secret=secret, read_only=True)
    assert np.array_equal(get(reader, KEYS), BLOCKS)
    root.rename(tmp_path / "elsewhere")
    put(open_tier(secret=namespace_secret(root)))
    for _ in range(2):
        clock.now += 60
        assert reader.contains_prefix(KEYS) == 0
    (record,) = caplog.records
    assert record.getMessage().startswith(f"reading {root}: ")
    assert "another folder, with another secret, is in its place; start again" in record.getMessage()
    shutil.rmtree(root)
    (tmp_path / "elsewhere").rename(root)
    clock.now += 60
    assert np.array_equal(get(reader, KEYS), BLOCKS)


@pytest.mark.parametrize("name", ["index.sqlite", "lock", "blocks-00000", "namespaces.secret"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_in_place_of_one_is_warned_of_and_does_not_block(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, make: Callable[[Path], None]
) -> None:
    """A FIFO was opened for as long as nothing read from it."""
    root = tmp_path / "store"
    secret = namespace_secret(root)
    put(written := open_tier(secret=secret))
    written.close()
    (path,) = root.rglob(name)
    path.unlink()
    make(path)
    with not_blocked_by(path):
        with caplog.at_level(logging.WARNING):
            tier = open_tier(secret=secret)
            put(tier, prefix_keys("bob", *range(6)))
        assert caplog.records
        assert len(get(tier, KEYS)) == 0
        if name == "lock":
            assert store_folder.owner_of(path.parent) is None
        if name == "namespaces.secret":
            for may_make in (True, False):
                with pytest.raises(OSError, match=name):
                    namespace_secret(root, may_make)


@pytest.mark.parametrize("name", ["index.sqlite", "index.sqlite-journal", "blocks-00000"])
def test_a_fifo_in_place_of_a_file_does_not_block_who_only_reads(
    open_tier: OpenTier, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """An engine did not start, and `radixkv store` did not end."""
    put(written := open_tier())
    written.close()
    path = slot_file(tmp_path).with_name(name)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    with not_blocked_by(path):
        tier = open_tier(read_only=True)
        assert len(get(tier, KEYS)) == 0
        assert len(caplog.records) == 1
        if name == "blocks-00000":
            assert verify(path.parent) == Verification(0, 6, 0)
        else:
            with pytest.raises(UnreadableIndexError, match=f"a FIFO is in the place of {name}\\)"):
                describe(path.parent)
        assert clear(path.parent) == (6 if name == "blocks-00000" else 0)
        put(again := open_tier())
        assert again.contains_prefix(KEYS) == (0 if name == "blocks-00000" else 6)


def test_a_file_that_ends_too_early_gives_misses(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    os.truncate(slot_file(tmp_path), 3 * SLOT + 1)
    assert np.array_equal(get(tier, KEYS), BLOCKS[:3])


def test_a_folder_that_cannot_be_made_turns_the_tier_off_until_it_can(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    root = tmp_path / "file"
    root.write_text("in the way")
    tier = DiskTier(root, FORMAT, capacity_bytes=64 * SLOT, queue_bytes=1 << 20, clock=clock)
    put(tier)
    assert len(get(tier, KEYS)) == 0
    assert len(caplog.records) == 1
    root.unlink()
    clock.now += 1
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()


def test_a_store_that_cannot_be_used_once_it_is_open_is_closed(open_tier: OpenTier, tmp_path: Path) -> None:
    """Its lock was kept, so that no later attempt could open it."""
    with mock.patch.object(StoredPins, "load", side_effect=OSError("planted")):
        tier = open_tier()
    assert not files_open_in(tmp_path)
    assert tier.stats.errors == 1


def test_a_store_that_could_not_be_made_leaves_nothing_behind(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each process that was started left another file, until there was room."""
    monkeypatch.setattr(store_folder, "sync", mock.Mock(side_effect=OSError(errno.ENOSPC, "no space left")))
    tier = open_tier()
    put(tier)
    assert tier.stats.dropped_blocks == 6
    assert tier.stats.errors == 1
    assert [*tmp_path.glob("store/*/*")] == []


def test_a_disk_on_which_no_block_could_be_tried_is_not_logged_as_working_again(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """Its next failure was warned of once more, and it was left alone for a second only."""
    with mock.patch.object(slot_files, "os", FaultyOs()) as disk:
        tier = open_tier()
        for fault, num_restored in (("write fails", 0), ("full", 0), ("none", 2)):  # writing, and taking space
            disk.fault = fault
            put(tier)
            assert sum(message.endswith("works again") for message in caplog.messages) == num_restored
            clock.now += 60
