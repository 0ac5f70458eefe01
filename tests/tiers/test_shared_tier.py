"""Stores that several processes share: a real server, and a folder."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.key_value_server import EXECUTABLE, KeyValueServer
from support.tier_model import FORMAT, FakeClock, get, partly_filled, prefix_keys

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
        put(tier)
        put(tier, prefix_keys("bob", second), BLOCKS[:1])
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


def test_a_clear_that_a_store_never_carried_out_is_warned_of(
    failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """The process ended in silence, and others went on finding the namespace."""
    tier = SharedTier(failing, FORMAT)
    put(tier)
    failing.clears_nothing = True
    tier.clear(KEYS[0].namespace)
    tier.close()
    assert caplog.messages[-1].endswith("what was cleared is still there: clear it again once it works")


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


def test_reads_beside_a_clear_that_hangs_ask_for_one_more_at_most(failing: FailingStore) -> None:
    """Each asked the thread that hangs for another one."""
    began, let_go = threading.Event(), threading.Event()

    def hang(prefix: str) -> None:
        began.set()
        assert let_go.wait(600)

    tier = SharedTier(failing, FORMAT)
    with mock.patch.object(failing.store, "clear", hang):
        tier.clear(prefix_keys("bob", 1)[0].namespace)
        assert began.wait(600)
        for _ in range(10):
            tier.contains_prefix(KEYS)
        assert len(tier._writer._queue) <= 1
        let_go.set()
        assert tier.flush(600)
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


def test_what_is_written_while_it_is_cleared_is_cleared_once_more(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, other = open_tier(), open_tier()
    cancel = tier._writer.cancel

    def put_and_cancel(*arguments: Any) -> None:
        put(tier)
        assert other.contains_prefix(KEYS) == 6
        cancel(*arguments)

    monkeypatch.setattr(tier._writer, "cancel", put_and_cancel)
    tier.clear(KEYS[0].namespace)
    monkeypatch.undo()
    assert tier.flush(600)
    assert other.contains_prefix(KEYS) == 0
