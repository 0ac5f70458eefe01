"""Stores that several processes share: a real server, and a folder."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.key_value_server import KeyValueServer
from support.tier_model import FORMAT, get, partly_filled, prefix_keys

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.redis_blobs import RedisBlobs
from radixkv.tiers.shared_tier import BlobStore, SharedTier

Open = Callable[..., SharedTier]


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


def test_what_is_cleared_again_while_the_store_clears_it_is_not_found_in_between(
    open_tier: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another process had written meanwhile was found after the second call, until that was carried out."""
    tier, other = open_tier(), open_tier()
    clear, found = tier._store.clear, []

    def clear_again(path: str) -> None:
        clear(path)
        monkeypatch.undo()
        put(other)
        tier._writer.call(lambda: found.append(tier.contains_prefix(KEYS)))  # before the second call is carried out
        tier.clear(KEYS[0].namespace)

    monkeypatch.setattr(tier._store, "clear", clear_again)
    tier.clear(KEYS[0].namespace)
    for _ in range(2):  # the second time, what the first call queued
        assert tier.flush(600)
    assert found == [0]
    assert other.contains_prefix(KEYS) == 0


def test_a_tier_that_was_closed_has_written_what_was_put_and_is_empty(open_tier: Open) -> None:
    tier, other = open_tier(), open_tier()
    tier.put_many(KEYS, BLOCKS)
    with mock.patch.object(tier._store, "close", side_effect=tier._store.close) as close:
        for _ in range(2):
            tier.close()
    close.assert_called_once()
    assert tier.contains_prefix(KEYS) == len(get(tier, KEYS)) == 0
    tier.clear()
    assert other.contains_prefix(KEYS) == 6


def test_blocks_of_another_form_are_refused_and_none_at_all_are_not(open_tier: Open) -> None:
    tier = open_tier()
    for call in (tier.get_many, tier.put_many, tier.borrow_many):
        with pytest.raises(ValueError, match=r"^blocks: expected contiguous bytes of shape \("):
            call(KEYS, BLOCKS[:2])
        assert not call([], BLOCKS[:0])
    tier.mark_used([])
    assert tier.flush(600)
    assert tier.contains_prefix([]) == tier.stats.errors == 0
