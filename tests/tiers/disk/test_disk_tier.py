"""The store on a disk: what survives, what is forgotten, and what it takes."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, SLOT, OpenTier, files_open_in, index_of, pin_of, put, slot_file
from support.tier_model import FORMAT, get, prefix_keys, random_blocks

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk import slot_files
from radixkv.tiers.disk.open_store import OpenStore
from radixkv.tiers.disk.slot_index import IndexedBlock
from radixkv.tiers.disk.slot_table import SlotTable
from radixkv.tiers.disk.store_writer import StoreWriter


def test_blocks_are_there_after_a_restart(open_tier: OpenTier) -> None:
    tier = open_tier()
    put(tier)
    tier.close()
    tier = open_tier()
    assert tier.contains_prefix(KEYS) == 6
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    assert tier.stats.hit_blocks == 6
    put(tier)
    assert not tier.stats.written_blocks  # they are there already


def test_a_cleared_namespace_stays_cleared_and_its_bytes_are_overwritten(open_tier: OpenTier, tmp_path: Path) -> None:
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


def test_a_block_that_is_cleared_while_it_waits_or_is_written_is_not_found_later(open_tier: OpenTier) -> None:
    tier = open_tier()
    real, writes, later = slot_files.SlotFiles.write, list[int](), prefix_keys("ann", 9)

    def write(files: Any, first: int, buffers: Any) -> None:
        real(files, first, buffers)
        if len(buffers) > 1:  # not where slots are overwritten
            writes.append(first)
            if len(writes) == 1:
                tier.put_many(later, BLOCKS[:1])
            tier.clear(KEYS[0].namespace)

    with mock.patch.object(slot_files.SlotFiles, "write", write):
        put(tier)
        assert tier.flush(600)
    assert len(writes) == 1
    assert tier.contains_prefix(KEYS) == tier.contains_prefix(later) == 0
    assert tier.stats.written_blocks == tier.stats.dropped_blocks == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


def test_what_is_cleared_while_its_row_is_written_is_not_in_the_index(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index had been cleared already, and then got the row, although clearing had returned."""
    tier = open_tier()
    clears: list[threading.Thread] = []
    commit = StoreWriter._commit

    def clear_and_commit(writer: StoreWriter, opened: OpenStore, blocks: Sequence[IndexedBlock]) -> None:
        if blocks and not clears:
            clears.append(threading.Thread(target=tier.clear, args=(KEYS[0].namespace,)))
            clears[0].start()
            while not writer._uncleared:
                time.sleep(0.001)
        commit(writer, opened, blocks)

    monkeypatch.setattr(StoreWriter, "_commit", clear_and_commit)
    put(tier, KEYS[:1], BLOCKS[:1])
    clears[0].join()
    assert tier.contains_prefix(KEYS[:1]) == 0
    tier.close()
    index = index_of(tmp_path)
    assert index.all() == []
    index.close()


def test_a_block_that_is_written_while_it_is_put_again_takes_one_slot(
    open_tier: OpenTier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads put it, one just before it was there and the other just after: its first slot was lost until a restart."""
    tier = open_tier(capacity_bytes=6 * SLOT)
    missing = SlotTable.missing

    def meanwhile(table: SlotTable, keys: Sequence[BlockKey]) -> list[int]:
        monkeypatch.setattr(SlotTable, "missing", missing)
        rows = missing(table, keys)
        put(tier, KEYS[:1], BLOCKS[:1])
        return rows

    monkeypatch.setattr(SlotTable, "missing", meanwhile)
    put(tier, KEYS[:1], BLOCKS[:1])
    other = prefix_keys("bob", *range(5))
    put(tier, other, BLOCKS[1:])
    assert tier.contains_prefix(KEYS[:1]) == 1
    assert tier.contains_prefix(other) == 5
    assert tier.stats.written_blocks == 6
    assert tier.stats.dropped_blocks == 0


def test_a_slot_whose_record_proved_wrong_is_free_for_the_next_block(open_tier: OpenTier, tmp_path: Path) -> None:
    """Only the next batch but one could use it: a block was dropped, although there was room for it."""
    tier = open_tier(capacity_bytes=6 * SLOT)
    put(tier)
    with slot_file(tmp_path).open("r+b") as file:
        file.write(b"\0")
    assert len(get(tier, KEYS)) == 0
    other = prefix_keys("bob", *range(6))
    put(tier, other)
    assert tier.contains_prefix(other) == 6
    assert tier.stats.dropped_blocks == 0


def test_what_the_queue_does_not_hold_is_dropped_and_counted(open_tier: OpenTier) -> None:
    tier = open_tier(queue_bytes=4 * FORMAT.block_bytes)
    put(tier)
    assert tier.contains_prefix(KEYS) == 4
    assert tier.stats.dropped_blocks == 2


def test_an_index_of_many_blocks_is_opened_whole(open_tier: OpenTier, tmp_path: Path) -> None:
    small = open_tier()
    put(small)
    small.close()
    index = index_of(tmp_path)
    name = bytes(20)
    index.commit((IndexedBlock(s, s.to_bytes(20, "big"), name, s) for s in range(20_000)), [], [])
    index.close()
    os.truncate(slot_file(tmp_path), 20_000 * SLOT)
    with mock.patch.object(slot_files, "FILE_BYTES", 1 << 40):
        tier = open_tier(capacity_bytes=20_000 * SLOT)
    assert len(tier) == 20_000
    tier.clear(b"nobody")
    assert len(tier) == 20_000


def test_rows_that_do_not_fit_their_keys_are_refused(open_tier: OpenTier) -> None:
    tier = open_tier()
    for rows in (BLOCKS[:5], BLOCKS[:, :-1], BLOCKS.astype(np.int8), BLOCKS[:, ::-1]):
        with pytest.raises(ValueError, match=r"blocks: expected contiguous bytes of shape \(6, 100\)"):
            tier.put_many(KEYS, rows)
        with pytest.raises(ValueError, match=r"blocks: expected contiguous bytes"):
            tier.get_many(KEYS, rows)
    with pytest.raises(ValueError, match="keys: expected 16 bytes of tokens"):
        tier.put_many([BlockKey(b"", KEYS[0].digest, b"1")], BLOCKS[:1])
    for length in (0, 3, 16, 20):
        with pytest.raises(ValueError, match=f"keys: expected fewer than 16 bytes of tokens .* got {length} "):
            tier.put_many([BlockKey(b"", KEYS[0].digest, bytes(length), is_whole=False)], BLOCKS[:1])


def test_reading_no_blocks_returns_none(open_tier: OpenTier) -> None:
    """Reading without native code raised a TypeError."""
    tier = open_tier()
    assert tier.get_many([], BLOCKS[:0].copy()) == tier.contains_prefix([]) == 0
    assert tier.stats.missed_blocks == 0


def test_calls_after_the_end_do_nothing(open_tier: OpenTier, tmp_path: Path) -> None:
    owner = open_tier()
    put(owner)
    for tier in (open_tier(read_only=True), owner):
        assert tier.contains_prefix(KEYS) == 6
        tier.close()
        tier.close()
        tier.put_many(KEYS, BLOCKS)
        tier.clear()
        tier.pins.add(pin_of(KEYS[0]))
        assert tier.flush(0.0)  # it used to wait for what nothing would do any more
        assert tier.contains_prefix(KEYS) == len(get(tier, KEYS)) == 0
    assert not files_open_in(tmp_path)  # a read-only store used to be opened again


def test_blocks_of_which_the_copy_takes_until_the_end_are_dropped(open_tier: OpenTier) -> None:
    """They were queued behind it, and their callers waited for ever."""
    tier = open_tier()

    class EndsMeanwhile(np.ndarray[Any, Any]):
        def __getitem__(self, row: Any) -> Any:
            tier.close()
            return super().__getitem__(row)

    tier.put_many(KEYS[:2], BLOCKS[:2].view(EndsMeanwhile))
    assert tier.flush(0.0)
    assert tier.stats.dropped_blocks == 2


def test_threads_that_read_put_and_clear_at_once_get_right_blocks_or_none(open_tier: OpenTier) -> None:
    tier = open_tier(capacity_bytes=20 * SLOT)  # so that slots are reused all the time
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
