"""A folder that several machines share: what becomes of it when its disk fails, is full, or is gone."""

from __future__ import annotations

import errno
import os
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.faulty_os import FaultyOs, disconnected
from support.tier_model import FORMAT, FakeClock, get, prefix_keys
from support.time_limit import HANGING

from radixkv.tiers import folder_blobs
from radixkv.tiers.disk.namespace_secret import namespace_secret
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.shared_tier import SharedTier


def test_of_a_batch_that_a_folder_took_in_part_each_block_is_counted_as_what_it_is(tmp_path: Path) -> None:
    """All of them used to count as dropped, and none as written."""
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=1 << 20), FORMAT)
    put(tier, KEYS[:1], BLOCKS[:1])
    drafts: list[str] = []

    def replace(source: Path, target: Path) -> None:
        drafts.append(os.fspath(source))
        if len(drafts) > 2:
            raise OSError(errno.EIO, "unwritable")
        os.rename(source, target)

    with mock.patch.object(os, "replace", replace):
        put(tier)
    assert tier.stats.written_blocks == 3
    assert tier.stats.dropped_blocks == 3
    assert tier.stats.errors == 1
    tier.close()


def test_a_folder_is_its_users_alone_and_its_files_are_written_whole(tmp_path: Path) -> None:
    mask = os.umask(0)
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:
        tier = SharedTier(FolderBlobs(tmp_path / "shared", capacity_bytes=1 << 20), FORMAT)
        disk.fault = "write fails"
        put(tier)
        assert not [path for path in tmp_path.rglob("*") if path.is_file()]
        disk.fault = "none"
        tier.close()
    tier = SharedTier(FolderBlobs(tmp_path / "shared", capacity_bytes=1 << 20), FORMAT)
    put(tier)
    tier.close()
    os.umask(mask)
    paths = list(tmp_path.rglob("*"))
    assert sum(path.is_file() for path in paths) == 6
    assert all(stat.S_IMODE(path.stat().st_mode) == (0o600 if path.is_file() else 0o700) for path in paths)


def test_a_folder_is_made_with_those_above_it(tmp_path: Path) -> None:
    """Every write failed, unless the folder held the secret of namespaces, with which it was made."""
    store = FolderBlobs(tmp_path / "above" / "shared", capacity_bytes=1 << 20)
    assert store.write({"prefix/block": b"bytes"}) == 1
    assert store.read(["prefix/block"]) == [b"bytes"]
    store.close()


def _make_folder(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


@pytest.mark.parametrize("make", [_make_folder, os.mkfifo, lambda path: path.symlink_to("/dev/zero")])
def test_what_is_there_in_place_of_a_block_is_replaced_by_one(make: Callable[[Path], None], tmp_path: Path) -> None:
    """Reading a pipe never ended, and for a folder all that was stored was left alone."""
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=1 << 20), FORMAT)
    put(tier)
    (path,) = tmp_path.rglob(KEYS[0].digest.hex())
    path.unlink()
    make(path)
    assert len(get(tier, KEYS)) == 0
    assert tier.flush(600)
    assert (tier.stats.corrupt_blocks, tier.stats.errors) == (1, 0)
    put(tier)
    assert len(get(tier, KEYS)) == len(KEYS)
    tier.close()


def test_no_file_stays_open(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1 << 20)

    def use(number: int) -> None:
        names = [f"{number}/block", f"{number}/missing", f"{number}/folder"]
        (store._path(names[2])).mkdir(parents=True)
        store.write({names[0]: b"bytes"})
        assert store.read(names) == [b"bytes", None, b""]

    use(0)  # threads begin
    before = len(os.listdir("/proc/self/fd"))
    for number in range(1, 9):
        use(number)
    assert len(os.listdir("/proc/self/fd")) < before + 8
    store.close()


def test_a_folder_that_was_emptied_gets_its_secret_back(tmp_path: Path) -> None:
    """The next process to start made another one, and found nothing of what was written from then on."""
    root = tmp_path / "shared"
    secret = namespace_secret(root)
    store = FolderBlobs(root, capacity_bytes=1 << 20, secret=secret)
    for _ in range(2):
        assert store.write({"prefix/block": b"bytes"}) == 1
        assert namespace_secret(root) == secret
        shutil.rmtree(root)
    store.close()


def test_a_folder_with_another_secret_is_neither_written_nor_cleared(
    tmp_path: Path, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What was written there was not found; and what was to be cleared, under other names there, stayed in silence."""
    root = tmp_path / "shared"
    store = FolderBlobs(root, capacity_bytes=1 << 20, secret=namespace_secret(root))
    tier = SharedTier(store, FORMAT, clock=clock)
    bob = prefix_keys("bob", 1)
    put(tier)
    put(tier, bob, BLOCKS[:1])
    root.rename(tmp_path / "mount point")
    theirs = namespace_secret(root)
    (root / "files").mkdir()
    for _ in range(2):
        put(tier)
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
        clock.now += 60
    (record,) = caplog.records
    assert "another folder, with another secret, is in its place; start again" in record.getMessage()
    assert namespace_secret(root) == theirs
    assert not [*(root / "files").iterdir()]
    shutil.rmtree(root)
    (tmp_path / "mount point").rename(root)
    clock.now += 60
    put(tier, prefix_keys("eve", 1), BLOCKS[:1])
    assert tier.contains_prefix(KEYS) == 0
    assert tier.contains_prefix(bob) == tier.contains_prefix(prefix_keys("eve", 1)) == 1
    tier.close()


def test_what_another_machine_clears_while_it_is_written_is_no_failure(tmp_path: Path) -> None:
    """The folder used to be left alone for a second or longer, like one that fails."""
    store, other = (FolderBlobs(tmp_path, capacity_bytes=1 << 20) for _ in range(2))
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:

        def replace(draft: Path, path: Path) -> None:
            if not cleared:
                cleared.append(path)
                other.clear("prefix")
            os.replace(draft, path)

        cleared: list[Path] = []
        with mock.patch.object(disk, "replace", replace, create=True):
            assert store.write({"prefix/block": b"bytes"}) == 1
    assert cleared
    assert other.read(["prefix/block"]) == [b"bytes"]
    for each in (store, other):
        each.close()


def test_what_another_machine_removes_of_what_is_cleared_is_no_failure(tmp_path: Path) -> None:
    """The folder counted as not cleared, and was left alone for a second or longer."""
    store, other = (FolderBlobs(tmp_path, capacity_bytes=1 << 20) for _ in range(2))
    store.write({f"prefix/{number}": b"bytes" for number in range(4)})
    unlink = os.unlink

    def unlink_late(*arguments: Any, **options: Any) -> None:
        with mock.patch.object(os, "unlink", unlink):
            other._cut_down_to(1 << 20)
        unlink(*arguments, **options)

    with mock.patch.object(os, "unlink", unlink_late):
        store.clear("prefix")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    for each in (store, other):
        each.close()


def test_what_another_machine_makes_or_removes_meanwhile_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, files, identity = FolderBlobs(tmp_path, capacity_bytes=300), FolderBlobs._files, folder_blobs.identity_of
    store.delete(["prefix/missing"])

    def look_and_make(path: Path) -> object:
        found = identity(path)
        if found is None:
            path.mkdir(parents=True)
        return found

    def look_and_remove(self: FolderBlobs) -> Iterator[Any]:
        found = [*files(self)]
        if len(found) > 3:
            Path(min(found).path).unlink()
        return iter(found)

    def remove_and_look(path: str) -> os.stat_result:
        Path(path).unlink()
        return os.stat(path)

    monkeypatch.setattr(folder_blobs, "identity_of", look_and_make)
    monkeypatch.setattr(FolderBlobs, "_files", look_and_remove)
    for number in range(6):
        assert store.write({f"{number}/block{number}": bytes(100)}) == 1
    monkeypatch.setattr(FolderBlobs, "_files", files)
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:
        disk.stat = remove_and_look
        assert store.write({"prefix/block": bytes(100)}) == 1
    store.close()


def test_what_a_killed_process_did_not_remove_of_what_it_cleared_is_removed(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1 << 20)
    store.write({"prefix/block": b"bytes"})
    with mock.patch.object(shutil, "rmtree"):
        store.clear("prefix")
    assert [path for path in tmp_path.rglob("*") if path.is_file()]
    store._cut_down_to(1 << 20)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]
    store.close()


def test_a_folder_whose_mount_is_gone_is_neither_cleared_nor_made_anew(tmp_path: Path) -> None:
    """It counted as cleared, and what had been in it was found once it was mounted again."""
    point = tmp_path / "point"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as mounted:
        assert os.stat(mounted).st_dev != os.stat(tmp_path).st_dev
        point.symlink_to(mounted)
        store = FolderBlobs(point, capacity_bytes=1 << 20)
        store.write({"prefix/block": b"bytes"})
        point.unlink()
        point.mkdir()
        assert store.read(["prefix/block"]) == [None]
        for act in (lambda: store.clear("prefix"), lambda: store.write({"prefix/other": b"bytes"})):
            with pytest.raises(
                OSError, match="what was mounted is gone; nothing is written until it is back, or until"
            ):
                act()
        assert not [*point.iterdir()]
        point.rmdir()
        point.symlink_to(mounted)
        assert store.read(["prefix/block"]) == [b"bytes"]
        store.clear("prefix")
        assert store.read(["prefix/block"]) == [None]
        shutil.rmtree(point / "files")
        store.write({"prefix/other": b"bytes"})  # emptied, but mounted
        store.close()


def test_a_folder_that_fails_at_the_start_is_used_once_it_is_back(tmp_path: Path, clock: FakeClock) -> None:
    """Opening it raised: no engine started while a mount's server was gone."""
    with disconnected(tmp_path):
        tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=1 << 20), FORMAT, clock=clock)
        put(tier)
        assert tier.contains_prefix(KEYS) == 0
        assert tier.stats.errors == 2  # a write and a read
    clock.now += 60
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()


def test_a_folder_that_fails_is_not_taken_for_one_without_blocks(
    tmp_path: Path, clock: FakeClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With Python 3.14, whose `Path.exists` is False then, each look-up waited for the failure, and none was counted."""
    monkeypatch.setattr(Path, "exists", lambda path: os.path.exists(path))
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=1 << 20), FORMAT, clock=clock)
    put(tier)
    with disconnected(tmp_path):
        for _ in range(3):
            assert tier.contains_prefix(KEYS) == 0
            assert tier.first_present(KEYS) is None
    assert tier.stats.errors == 1
    clock.now += 60
    assert tier.contains_prefix(KEYS) == 6
    tier.close()


def test_what_a_folder_fails_with_reaches_the_reader(tmp_path: Path) -> None:
    store = FolderBlobs(tmp_path, capacity_bytes=1 << 20)
    store.write({"prefix/block": b"bytes"})
    with mock.patch.object(folder_blobs, "os", FaultyOs()) as disk:
        disk.fault = "read fails"
        with pytest.raises(OSError, match="unreadable"):
            store.read(["prefix/none", "prefix/block"])
    assert store.read(["prefix/none", "prefix/block"]) == [None, b"bytes"]
    store.close()
    with pytest.raises(RuntimeError):
        store.read(["prefix/block"])


def test_a_folder_that_hangs_does_not_keep_the_process_from_its_end(tmp_path: Path) -> None:
    hang = (
        "import sys, threading\n"
        "from pathlib import Path\n"
        "from radixkv.tiers.folder_blobs import FolderBlobs\n"
        "class HangingFolder(FolderBlobs):\n"
        "    def _read(self, name):\n"
        "        reads.set()\n"
        "        threading.Event().wait()\n"
        "reads = threading.Event()\n"
        "store = HangingFolder(Path(sys.argv[1]), capacity_bytes=1 << 20)\n"
        "threading.Thread(target=store.read, args=(['prefix/block'],), daemon=True).start()\n"
        "reads.wait()\n"
        "store.close()\n"
    )
    subprocess.run([sys.executable, "-c", hang, tmp_path], check=True, timeout=HANGING)


def test_a_folder_that_cannot_be_written_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading what was an hour old marked it as used, which failed, so that nothing was found any more."""
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=1 << 20), FORMAT)
    put(tier)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    monkeypatch.setattr(os, "utime", mock.Mock(side_effect=OSError(errno.EROFS, "planted")))
    assert len(get(tier, KEYS)) == len(KEYS)
    tier.mark_used(KEYS)
    assert tier.flush(600)
    assert len(get(tier, KEYS)) == len(KEYS)
    tier.close()
