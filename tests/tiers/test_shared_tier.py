"""Stores that several processes share: a real server, and a folder."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.faulty_os import FaultyOs, disconnected
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tier_model import FORMAT, FakeClock, get, partly_filled, prefix_keys

from radixkv.tiers import folder_blobs
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.redis_blobs import RedisBlobs
from radixkv.tiers.shared_tier import BlobStore, PartlyWrittenError, SharedTier

Open = Callable[..., SharedTier]


@pytest.fixture(scope="module")
def server() -> Iterator[KeyValueServer]:
    if EXECUTABLE is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = KeyValueServer()
    yield server
    server.kill()


@pytest.fixture(params=["redis", "folder"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], BlobStore]:
    """Makes stores that share one place."""
    if request.param == "folder":
        return lambda: FolderBlobs(tmp_path / "shared", capacity_bytes=1 << 20)
    server: KeyValueServer = request.getfixturevalue("server")
    return lambda: RedisBlobs(server.url, timeout=600)


@pytest.fixture
def open_tier(make_store: Callable[[], BlobStore]) -> Iterator[Open]:
    """Open tiers over one place; at the end it is emptied, and they are closed."""
    tiers: list[SharedTier] = []

    def open_tier(block_format: BlockFormat = FORMAT, **options: Any) -> SharedTier:
        tiers.append(SharedTier(make_store(), block_format, **({"queue_bytes": 1 << 20} | options)))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.clear()
        tier.close()


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain", "sealed"])
def test_what_one_wrote_another_reads(open_tier: Open, key: bytes | None) -> None:
    first, second = open_tier(key=key), open_tier(key=key)
    put(first)
    assert second.contains_prefix([*KEYS, *prefix_keys("ann", 9)]) == 6
    assert np.array_equal(get(second, KEYS), BLOCKS)
    assert second.stats.hit_blocks == 6
    put(second)
    assert second.stats.written_blocks == second.stats.dropped_blocks == 0  # they are there already


@pytest.mark.parametrize("key", [None, bytes(32)], ids=["plain", "sealed"])
def test_a_partly_filled_block_is_found_by_its_length(open_tier: Open, key: bytes | None) -> None:
    first, second = open_tier(key=key), open_tier(key=key)
    lengths = [partly_filled(KEYS[3], num_tokens) for num_tokens in (3, 2, 1)]
    assert first.first_present(lengths) is None
    put(first, [*KEYS[:4], lengths[1]], BLOCKS[:5])
    assert second.first_present(lengths) == 1
    assert second.first_present(lengths[2:]) is None
    assert np.array_equal(get(second, [*KEYS[:4], lengths[1]]), BLOCKS[:5])


def test_another_format_or_key_finds_nothing(open_tier: Open) -> None:
    put(open_tier())
    assert open_tier(BlockFormat(b"another", FORMAT.block_size, FORMAT.block_bytes)).contains_prefix(KEYS) == 0
    sealed = open_tier(key=bytes(32))
    assert sealed.contains_prefix(KEYS) == 0
    put(sealed)
    assert open_tier(key=bytes([1] * 32)).contains_prefix(KEYS) == 0


def test_a_cleared_namespace_is_cleared_for_all_and_no_other(open_tier: Open) -> None:
    first, second = open_tier(), open_tier()
    other = prefix_keys("bob", 1, 2)
    put(first)
    put(first, other, BLOCKS[:2])
    second.clear(KEYS[0].namespace)
    assert second.contains_prefix(KEYS) == 0
    assert second.flush(600)
    assert first.contains_prefix(KEYS) == 0
    assert np.array_equal(get(first, other), BLOCKS[:2])
    put(second)
    assert np.array_equal(get(first, KEYS), BLOCKS)
    first.clear()
    assert first.flush(600)
    assert second.contains_prefix(KEYS) == second.contains_prefix(other) == 0


@pytest.mark.parametrize("damage", ["flipped", "short", "empty", "another's"])
def test_a_damaged_blob_is_a_miss_with_a_count_and_can_be_written_again(
    open_tier: Open, make_store: Callable[[], BlobStore], damage: str
) -> None:
    tier = open_tier()
    put(tier)
    store = make_store()
    names = [tier._name(key) for key in KEYS]
    blob, other = store.read([names[2], names[3]])
    assert blob is not None
    assert other is not None
    damaged = {"flipped": blob[:-1] + bytes([blob[-1] ^ 1]), "short": blob[:-1], "empty": b"", "another's": other}[
        damage
    ]
    store.delete([names[2]])
    assert store.write({names[2]: damaged}) == 1
    assert np.array_equal(get(tier, KEYS), BLOCKS[:2])
    assert tier.stats.corrupt_blocks == 1
    assert tier.flush(600)
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    store.close()


class FailingStore:
    """Passes calls on, unless it is told to fail."""

    description = "a store"

    def __init__(self, store: BlobStore) -> None:
        self.store = store
        self.failing = self.is_full = self.clears_nothing = False
        self.num_calls = 0

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: Any) -> Any:
            self.num_calls += 1
            if self.failing or (self.clears_nothing and name == "clear"):
                raise OSError("gone")
            if self.is_full and name == "write" and self.store.count_present([*arguments[0]]) < len(arguments[0]):
                raise OSError("full")
            return getattr(self.store, name)(*arguments)

        return call


@pytest.fixture
def failing(tmp_path: Path) -> FailingStore:
    return FailingStore(FolderBlobs(tmp_path, capacity_bytes=1 << 20))


def test_a_store_that_is_gone_is_warned_of_once_and_asked_seldom(
    failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    failing.failing = True
    failing.num_calls = 0
    with caplog.at_level(logging.WARNING):
        for _ in range(10):
            assert tier.contains_prefix(KEYS) == 0
            assert len(get(tier, KEYS)) == 0
            put(tier, prefix_keys("bob", 1), BLOCKS[:1])
        assert failing.num_calls == 2  # a read and a write
        clock.now += 1.5
        assert len(get(tier, KEYS)) == 0
        clock.now += 1.5  # the second wait is two seconds
        assert len(get(tier, KEYS)) == 0
        assert failing.num_calls == 3
        assert len(caplog.records) == 2
    assert tier.stats.errors == 3
    assert tier.stats.dropped_blocks == 10
    failing.failing = False
    clock.now += 60
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    assert tier.contains_prefix(prefix_keys("bob", 1)) == 1
    tier.close()


def test_a_store_that_refuses_writes_is_still_read(failing: FailingStore, caplog: pytest.LogCaptureFixture) -> None:
    """A full store was once not read either, and each read was followed by a log line that it works again."""
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    failing.is_full = True
    for second in range(10):
        put(tier, prefix_keys("bob", second), BLOCKS[:1])
        put(tier)
        assert tier.contains_prefix(KEYS) == 6
        assert np.array_equal(get(tier, KEYS), BLOCKS)
        clock.now += 1
    assert len(caplog.records) == 1
    failing.is_full = False
    clock.now += 60
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    assert tier.contains_prefix(prefix_keys("bob", 1)) == 1
    assert len(caplog.records) == 2
    tier.close()


@pytest.mark.parametrize("next_use", ["write", "read it", "read another's", "close"])
def test_a_store_that_was_gone_is_cleared_when_it_is_back(failing: FailingStore, tmp_path: Path, next_use: str) -> None:
    """It was only cleared if something was written then; a process that found all it needed left what others could find."""
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    failing.failing = True
    tier.clear(KEYS[0].namespace)
    assert tier.flush(600)
    failing.failing = False
    names = [tier._name(key) for key in KEYS]
    assert failing.count_present(names) == 6
    clock.now += 60
    if next_use == "write":
        put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    elif next_use == "close":
        tier.close()
        assert FolderBlobs(tmp_path, capacity_bytes=1 << 20).count_present(names) == 0
        return
    else:
        for _ in range(2):
            assert tier.contains_prefix(KEYS if next_use == "read it" else prefix_keys("bob", 1)) == 0
        assert tier.flush(600)
    assert failing.count_present(names) == 0
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()


def test_a_store_that_stays_gone_is_not_asked_to_clear_at_each_read(failing: FailingStore) -> None:
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    failing.clears_nothing = True
    tier.clear(KEYS[0].namespace)
    assert tier.flush(600)
    for _ in range(3):
        clock.now += 60
        failing.num_calls = 0
        for _ in range(10):
            tier.contains_prefix(prefix_keys("bob", 1))
            assert tier.flush(600)
        assert failing.num_calls == 11  # one to clear
    tier.close()


@pytest.mark.parametrize("error", [MemoryError, RuntimeError])
def test_what_cannot_be_encoded_is_dropped_and_others_are_cleared(
    open_tier: Open, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    """After one MemoryError nothing was written any more; nor was what a namespace had stored before cleared for others."""
    tier, other = open_tier(), open_tier()
    put(tier)
    lost, later = prefix_keys("bob", 1), prefix_keys("eve", 1)
    with mock.patch.object(tier._codec, "encode", side_effect=error):
        put(tier, lost, BLOCKS[:1])
    put(tier, later, BLOCKS[:1])
    assert other.contains_prefix(lost) == 0
    assert other.contains_prefix(later) == (
        error is MemoryError
    )  # anything else is a bug, and nothing is written any more
    assert tier.stats.dropped_blocks == (1 if error is MemoryError else 2)
    assert len(caplog.records) == 1
    tier.clear(KEYS[0].namespace)
    assert tier.flush(600)
    assert other.contains_prefix(KEYS) == 0


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


def test_of_a_batch_that_a_server_took_in_part_each_block_is_counted_as_what_it_is(server: KeyValueServer) -> None:
    store = RedisBlobs(server.url)
    rules = ["resetkeys", "%R~*", "~radixkv/format/*"]
    store._client.execute_command("ACL", "SETUSER", "default", *rules)
    try:
        with pytest.raises(PartlyWrittenError, match="NoPermissionError") as raised:
            store.write({"format/a": b"1", "other/b": b"2", "format/c": b"3", "other/d": b"4", "other/e": b"5"})
        assert (raised.value.num_written, raised.value.num_lost) == (2, 3)
        assert store.read(["format/a", "other/b", "format/c"]) == [b"1", None, b"3"]
    finally:
        store._client.execute_command("ACL", "SETUSER", "default", "allkeys")
        store.close()


def test_a_server_that_hangs_is_not_waited_for(server: KeyValueServer) -> None:
    tier = SharedTier(RedisBlobs(server.url, timeout=0.05), FORMAT, clock=FakeClock())
    server.pause()
    try:
        assert tier.contains_prefix(KEYS) == 0
        assert len(get(tier, KEYS)) == 0
        assert tier.stats.errors == 1
    finally:
        server.resume()
        tier.close()


def test_a_server_that_dies_and_comes_back_is_used_again() -> None:
    if EXECUTABLE is None:
        pytest.skip("neither valkey-server nor redis-server is installed")
    server = KeyValueServer()
    clock = FakeClock()
    tier = SharedTier(RedisBlobs(server.url, timeout=600), FORMAT, clock=clock)
    put(tier)
    server.kill()
    assert len(get(tier, KEYS)) == 0
    put(tier)
    assert tier.stats.errors == 2  # a read and a write
    server.start()
    clock.now += 60
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()
    server.kill()


def test_a_server_that_is_down_at_the_start_is_none(tmp_path: Path) -> None:
    tier = SharedTier(RedisBlobs(f"unix://{tmp_path}/nobody"), FORMAT)
    put(tier)
    assert tier.contains_prefix(KEYS) == 0
    assert tier.stats.dropped_blocks == 6
    tier.close()


def test_a_servers_password_is_not_shown() -> None:
    assert RedisBlobs("redis://ann:secret@host:6379/1").description == "redis://host:6379/1"


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
                OSError, match="what was mounted is gone; an empty disk in its place is used from the next start"
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
    subprocess.run([sys.executable, "-c", hang, tmp_path], check=True, timeout=60)


def test_a_folder_is_held_to_its_capacity(tmp_path: Path) -> None:
    size = 6 * (len(BLOCKS[0]) + 72)
    tier = SharedTier(FolderBlobs(tmp_path, capacity_bytes=size), FORMAT)
    put(tier)
    for path in tmp_path.rglob("*"):
        os.utime(path, (0, 0))
    assert len(get(tier, KEYS[:2])) == 2  # these were used
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


def test_a_folder_makes_room_on_a_disk_that_is_smaller_than_its_capacity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It used to stay full for good: it held less than its capacity, so nothing was removed."""
    store = FolderBlobs(tmp_path, capacity_bytes=1_000_000)
    used = lambda: sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())  # noqa: E731
    write_once = FolderBlobs._write_once

    def write(self: FolderBlobs, path: Path, blob: bytes) -> None:
        if used() + len(blob) > 20_000:
            raise OSError(errno.ENOSPC, "no space left")
        write_once(self, path, blob)

    monkeypatch.setattr(FolderBlobs, "_write_once", write)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(used=used() + 5_000))
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
    blobs = {f"prefix/{number}": bytes(100) for number in range(6)}
    store.write(blobs)
    for use in (lambda: store.write(blobs), lambda: store.read([*blobs])):
        for path in tmp_path.rglob("*"):
            os.utime(path, (0, 0))
        use()
        store.write({f"other/{use}": bytes(100)})
        assert store.count_present([*blobs]) == 5
        store.write(blobs)
    store.close()


def test_blobs_used_when_a_clock_was_ahead_make_room_like_others(tmp_path: Path) -> None:
    """Until all clocks had passed their time, they stayed, and whatever was written was removed again."""
    store = FolderBlobs(tmp_path, capacity_bytes=600)
    old = {f"prefix/{number}": bytes(100) for number in range(6)}
    store.write(old)
    for use in (lambda: store.read([*old]), lambda: store.write({"other/first": bytes(100)})):
        for path in tmp_path.rglob("*"):
            os.utime(path, (4e9, 4e9))
        use()
        store.write({f"other/{use}": bytes(100)})
        assert store.count_present([f"other/{use}"]) == 1
        store.write(old)
    store.close()


def test_what_waits_when_it_is_cleared_is_not_written_afterwards(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_write, writes = threading.Event(), threading.Event()
    tier, other = open_tier(), open_tier()
    write = tier._store.write

    def wait(blobs: Any) -> int:
        writes.set()
        assert may_write.wait(600)
        return write(blobs)

    monkeypatch.setattr(tier._store, "write", wait)
    tier.put_many(KEYS[:1], BLOCKS[:1])
    assert writes.wait(600)
    tier.put_many(KEYS, BLOCKS)  # behind the batch that is being written
    tier.clear(KEYS[0].namespace)
    may_write.set()
    assert tier.flush(60)
    assert tier.stats.dropped_blocks == 0  # what is cleared is not dropped
    assert [other.contains_prefix(KEYS[start:]) for start in range(6)] == [0] * 6
    assert tier.contains_prefix(KEYS[1:]) == 0
