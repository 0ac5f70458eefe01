"""The store on a disk: what survives, what is refused, and what happens when the disk fails."""

from __future__ import annotations

import logging
import os
import random
import sqlite3
import stat
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.faulty_os import FaultyOs
from support.tier_model import BLOCK_SIZE, FORMAT, FakeClock, get, prefix_keys, random_blocks

from radixkv.errors import StoreInUseError
from radixkv.tiers import slot_files
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk_tier import DiskTier
from radixkv.tiers.slot_index import IndexedBlock, SlotIndex

KEYS = prefix_keys("ann", *range(6))
BLOCKS = random_blocks(0, 6)
SLOT = 4096

Open = Callable[..., DiskTier]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def open_tier(tmp_path: Path, clock: FakeClock) -> Iterator[Open]:
    """Opens tiers in one folder; those that are left open are closed."""
    tiers: list[DiskTier] = []

    def open_tier(block_format: BlockFormat = FORMAT, **options: Any) -> DiskTier:
        options = {"capacity_bytes": 64 * SLOT, "queue_bytes": 1 << 20, "clock": clock} | options
        tiers.append(DiskTier(tmp_path / "store", block_format, **options))
        return tiers[-1]

    yield open_tier
    for tier in tiers:
        tier.close()


def put(tier: DiskTier, keys: list[BlockKey] = KEYS, blocks: Any = BLOCKS) -> None:
    tier.put_many(keys, blocks)
    assert tier.flush(600)


def slot_file(tmp_path: Path) -> Path:
    (path,) = tmp_path.glob("store/*/blocks-00000")
    return path


def test_blocks_are_there_after_a_restart(open_tier: Open) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 6
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    assert tier.stats.hit_blocks == 6
    put(tier)
    assert not tier.stats.written_blocks  # they are there already


@pytest.mark.parametrize("key", [None, bytes(range(32))], ids=["plain", "sealed"])
@pytest.mark.parametrize("where", ["magic", "checksum", "digest", "tokens", "first byte", "last byte"])
def test_a_flipped_bit_is_a_miss_with_a_count(open_tier: Open, tmp_path: Path, where: str, key: bytes | None) -> None:
    if key and where in ("magic", "checksum", "tokens"):
        pytest.skip("the tag covers what matters; `radixkv store verify` reads the checksum")
    tier = open_tier(key=key)
    put(tier)
    body = SLOT - FORMAT.block_bytes - (16 if key else 0)
    offset = {"magic": 0, "checksum": 8, "digest": 24, "tokens": 56, "first byte": body, "last byte": SLOT - 1}[where]
    with slot_file(tmp_path).open("r+b") as file:
        file.seek(2 * SLOT + offset)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    assert np.array_equal(get(tier, KEYS), BLOCKS[:2])
    assert tier.stats.corrupt_blocks == 1
    assert tier.contains_prefix(KEYS) == 2
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    tier.close()
    assert np.array_equal(get(open_tier(key=key), KEYS), BLOCKS)


def test_tokens_are_compared_even_where_digests_collide(open_tier: Open) -> None:
    for key in (None, bytes(32)):
        tier = open_tier(key=key)
        put(tier)
        forged = BlockKey(KEYS[0].namespace, KEYS[0].digest, bytes(range(4 * BLOCK_SIZE)))
        assert len(get(tier, [forged])) == 0
        tier.close()


def test_a_slot_that_an_old_index_gives_to_another_block_is_a_miss(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    (folder,) = tmp_path.glob("store/*")
    index = SlotIndex(folder, writable=True)
    rows = index.all()
    index.commit([], [], [row.slot for row in rows])
    index.commit([row._replace(slot=(row.slot + 1) % 6) for row in rows], [], [])
    index.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 6
    assert len(get(tier, KEYS)) == 0
    assert tier.stats.corrupt_blocks == 0


@pytest.mark.parametrize(
    "other",
    [
        BlockFormat(b"another model, dtype or quantisation", BLOCK_SIZE, FORMAT.block_bytes),
        BlockFormat(FORMAT.fingerprint, BLOCK_SIZE, FORMAT.block_bytes + 1),
    ],
    ids=["fingerprint", "bytes"],
)
def test_another_format_in_the_same_folder_is_never_hit(open_tier: Open, other: BlockFormat) -> None:
    put(open_tier())
    tier = open_tier(other)
    assert tier.contains_prefix(KEYS) == 0
    assert get(tier, KEYS, other.block_bytes).shape[0] == 0


def test_a_format_of_another_version_is_never_hit(open_tier: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    put(open_tier())
    monkeypatch.setattr("radixkv.tiers.block_format.FORMAT_VERSION", 99)
    assert open_tier().contains_prefix(KEYS) == 0


def test_another_encryption_key_finds_nothing_and_no_key_neither(open_tier: Open) -> None:
    put(open_tier(key=bytes(32)))
    assert open_tier(key=bytes([1] * 32)).contains_prefix(KEYS) == 0
    assert open_tier().contains_prefix(KEYS) == 0


def test_an_encrypted_store_holds_neither_blocks_nor_tokens(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier(key=bytes(32))
    keys = prefix_keys("ann", 11, 12)
    put(tier, keys, BLOCKS[:2])
    tier.close()
    written = b"".join(path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    assert BLOCKS[0].tobytes()[:16] not in written
    assert keys[0].tokens not in written


def test_files_are_their_owners_alone(open_tier: Open, tmp_path: Path) -> None:
    mask = os.umask(0)
    try:
        tier = open_tier()
        put(tier)
        modes = {
            path: stat.S_IMODE(path.stat().st_mode) for path in [tmp_path / "store", *tmp_path.rglob("store/**/*")]
        }
    finally:
        os.umask(mask)
    assert len(modes) >= 6
    assert set(modes.values()) == {0o600, 0o700}
    assert {path for path, mode in modes.items() if mode == 0o700} == {p for p in modes if p.is_dir()}


def test_the_second_owner_is_refused_with_the_firsts_id(open_tier: Open) -> None:
    first = open_tier()
    with pytest.raises(StoreInUseError, match=rf"written by process {os.getpid()} on "):
        open_tier()
    first.close()
    open_tier()


def test_a_second_process_may_read_what_the_first_writes(open_tier: Open) -> None:
    owner = open_tier()
    put(owner, KEYS[:2], BLOCKS[:2])
    reader = open_tier(read_only=True)
    assert np.array_equal(get(reader, KEYS), BLOCKS[:2])
    put(owner)
    assert reader.contains_prefix(KEYS) == 6
    assert np.array_equal(get(reader, KEYS), BLOCKS)
    reader.put_many(prefix_keys("", 7), BLOCKS[:1])
    reader.clear()
    assert len(owner) == len(reader) == 6
    owner.clear()
    assert reader.contains_prefix(KEYS) == 0


def test_a_reader_may_come_before_the_owner(open_tier: Open, clock: FakeClock) -> None:
    reader = open_tier(read_only=True)
    assert reader.contains_prefix(KEYS) == 0
    put(open_tier())
    clock.now += 1
    assert np.array_equal(get(reader, KEYS), BLOCKS)


def test_a_cleared_namespace_stays_cleared_and_its_bytes_are_overwritten(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    other = prefix_keys("bob", 1, 2)
    put(tier, other, BLOCKS[:2] ^ 255)
    tier.clear(KEYS[0].namespace)
    assert tier.contains_prefix(KEYS) == 0
    assert np.array_equal(get(tier, other), BLOCKS[:2] ^ 255)
    assert tier.flush(600)
    assert all(block.tobytes() not in slot_file(tmp_path).read_bytes() for block in BLOCKS)
    tier.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 0
    assert tier.contains_prefix(other) == 2
    tier.clear()
    assert tier.flush(600)
    assert slot_file(tmp_path).stat().st_size == 0
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)


def test_a_block_that_is_cleared_while_it_waits_or_is_written_is_not_found_later(open_tier: Open) -> None:
    tier = open_tier()
    real = SlotIndex.commit

    def commit(index: SlotIndex, *rows: Any) -> None:
        real(index, *rows)

    def write(files: Any, first: int, buffers: Any) -> None:
        files_write(files, first, buffers)
        if len(buffers) > 1:  # not where slots are overwritten
            tier.clear(KEYS[0].namespace)

    files_write = slot_files.SlotFiles.write
    with mock.patch.object(SlotIndex, "commit", commit), mock.patch.object(slot_files.SlotFiles, "write", write):
        put(tier)
    assert tier.contains_prefix(KEYS) == 0
    assert tier.stats.written_blocks == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


def test_a_clear_that_the_disk_refused_is_made_up_for(open_tier: Open, clock: FakeClock) -> None:
    tier = open_tier()
    put(tier)
    with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
        tier.clear(KEYS[0].namespace)
    assert tier.contains_prefix(KEYS) == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


def test_what_was_cleared_while_the_disk_was_gone_is_not_there_when_it_is_back(
    open_tier: Open, clock: FakeClock
) -> None:
    tier = open_tier()
    put(tier)
    put(tier, prefix_keys("bob", 1), BLOCKS[:1])
    tier.close()
    with mock.patch("radixkv.tiers.disk_tier.FolderLock", side_effect=OSError("gone")):
        tier = open_tier()
        tier.clear(KEYS[0].namespace)
    clock.now += 60
    put(tier, prefix_keys("eve", 1), BLOCKS[:1])
    assert tier.contains_prefix(KEYS) == 0
    assert tier.contains_prefix(prefix_keys("bob", 1)) == tier.contains_prefix(prefix_keys("eve", 1)) == 1


def test_the_least_recently_used_make_room_and_tails_go_before_heads(open_tier: Open) -> None:
    tier = open_tier(capacity_bytes=8 * SLOT)
    old, used = prefix_keys("a", 1, 2, 3, 4), prefix_keys("b", 1, 2, 3, 4)
    put(tier, used, BLOCKS[:4])
    put(tier, old, BLOCKS[:4])
    assert len(get(tier, used)) == 4
    put(tier, prefix_keys("c", 1, 2), BLOCKS[:2])
    assert tier.contains_prefix(used) == 4
    assert tier.contains_prefix(old) == 2
    assert tier.stats.evicted_blocks == 2
    tier.close()
    tier = open_tier(capacity_bytes=8 * SLOT)  # who was used when is remembered
    put(tier, prefix_keys("d", 1, 2), BLOCKS[:2])
    assert tier.contains_prefix(old) == 0
    assert tier.contains_prefix(used) == 4


def test_a_prefix_longer_than_a_batch_keeps_its_head_longest(open_tier: Open) -> None:
    tier = open_tier(capacity_bytes=64 * SLOT)
    keys = prefix_keys("", *range(64))
    put(tier, keys, random_blocks(1, 64))
    put(tier, prefix_keys("b", *range(10)), random_blocks(2, 10))
    assert tier.contains_prefix(keys) == 54


def test_known_blocks_of_a_prefix_do_not_make_room_for_the_rest_of_it(open_tier: Open) -> None:
    tier = open_tier(capacity_bytes=8 * SLOT)
    put(tier, KEYS[:2], BLOCKS[:2])
    put(tier, prefix_keys("b", *range(6)), BLOCKS)
    put(tier)
    assert tier.contains_prefix(KEYS) == 6


def test_a_smaller_capacity_gives_space_back(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    tier = open_tier(capacity_bytes=2 * SLOT)
    assert slot_file(tmp_path).stat().st_size == 2 * SLOT
    assert np.array_equal(get(tier, KEYS), BLOCKS[:2])


def test_what_the_queue_does_not_hold_is_dropped_and_counted(open_tier: Open) -> None:
    tier = open_tier(queue_bytes=4 * FORMAT.block_bytes)
    put(tier)
    assert tier.contains_prefix(KEYS) == 4
    assert tier.stats.dropped_blocks == 2


FAULTS_OF_WRITING = ["write fails", "full", "gone"]


@pytest.mark.parametrize("fault", FAULTS_OF_WRITING)
def test_a_disk_that_cannot_be_written_is_warned_of_once_and_tried_again_later(
    open_tier: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture, fault: str
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


def test_a_disk_that_is_full_later_keeps_what_it_has_and_makes_room_there(open_tier: Open, clock: FakeClock) -> None:
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


def test_space_that_a_full_disk_gave_in_part_is_given_back(open_tier: Open, tmp_path: Path) -> None:
    def give_half(descriptor: int, offset: int, length: int) -> None:
        os.ftruncate(descriptor, length // 2)
        raise OSError(28, "no space left")

    with mock.patch.object(os, "posix_fallocate", give_half):
        tier = open_tier()
        put(tier)
        assert tier.contains_prefix(KEYS) == 0
        assert slot_file(tmp_path).stat().st_size == 0


def test_a_block_that_cannot_be_read_is_a_miss_and_the_disk_is_spared(
    open_tier: Open, clock: FakeClock, caplog: pytest.LogCaptureFixture
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


def test_a_file_that_ends_too_early_gives_misses(open_tier: Open, tmp_path: Path) -> None:
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


def test_a_damaged_index_is_begun_anew(open_tier: Open, tmp_path: Path) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    (index,) = tmp_path.glob("store/*/index.sqlite")
    index.write_bytes(b"nonsense" * 1000)
    tier = open_tier()
    assert len(tier) == 0
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)


def test_an_index_of_many_blocks_is_opened_whole(open_tier: Open, tmp_path: Path) -> None:
    small = open_tier()
    put(small)
    small.close()
    (folder,) = tmp_path.glob("store/*")
    index = SlotIndex(folder, writable=True)
    name = bytes(20)
    index.commit((IndexedBlock(s, s.to_bytes(20, "big"), name, s) for s in range(20_000)), [], [])
    index.close()
    os.truncate(slot_file(tmp_path), 20_000 * SLOT)
    with mock.patch.object(slot_files, "FILE_BYTES", 1 << 40):
        tier = open_tier(capacity_bytes=20_000 * SLOT)
    assert len(tier) == 20_000
    tier.clear(b"nobody")
    assert len(tier) == 20_000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"capacity_bytes": SLOT - 1}, "capacity_bytes: expected at least 4096, one slot, got 4095"),
        ({"key": b"short"}, "key: expected 32 bytes, got 5"),
    ],
)
def test_bad_options_are_refused(open_tier: Open, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_tier(**options)


def test_rows_that_do_not_fit_their_keys_are_refused(open_tier: Open) -> None:
    tier = open_tier()
    for rows in (BLOCKS[:5], BLOCKS[:, :-1], BLOCKS.astype(np.int8), BLOCKS[:, ::-1]):
        with pytest.raises(ValueError, match=r"blocks: expected contiguous bytes of shape \(6, 100\)"):
            tier.put_many(KEYS, rows)
        with pytest.raises(ValueError, match=r"blocks: expected contiguous bytes"):
            tier.get_many(KEYS, rows)
    with pytest.raises(ValueError, match="keys: expected 16 bytes of tokens"):
        tier.put_many([BlockKey(b"", KEYS[0].digest, b"1")], BLOCKS[:1])


def test_calls_after_the_end_do_nothing(open_tier: Open) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    tier.close()
    tier.put_many(KEYS, BLOCKS)
    tier.clear()
    assert len(get(tier, KEYS)) == 0


def test_threads_that_read_put_and_clear_at_once_get_right_blocks_or_none(open_tier: Open) -> None:
    tier = open_tier(capacity_bytes=20 * SLOT)  # so that slots are given to others all the time
    prefixes = [prefix_keys(namespace, n, *range(5)) for namespace in ("ann", "bob") for n in range(6)]
    contents = [random_blocks(n, 6) for n in range(len(prefixes))]

    def work(seed: int) -> int:
        chance = random.Random(seed)
        hits = 0
        for _ in range(300):
            which = chance.randrange(len(prefixes))
            if chance.random() < 0.4:
                tier.put_many(prefixes[which], contents[which])
            if chance.random() < 0.2:
                assert tier.flush(600)
            blocks = get(tier, prefixes[which])
            assert np.array_equal(blocks, contents[which][: len(blocks)])
            hits += len(blocks)
            if chance.random() < 0.03:
                tier.clear(chance.choice([None, prefixes[which][0].namespace]))
        return hits

    with ThreadPoolExecutor(4) as threads:
        assert sum(threads.map(work, range(4)))
    assert tier.flush(600)
    assert tier.stats.corrupt_blocks == tier.stats.errors == 0
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
