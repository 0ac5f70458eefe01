"""The one process that writes to a store, and others that read it."""

from __future__ import annotations

import fcntl
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, OpenTier, put
from support.tier_model import FakeClock, get, prefix_keys

from radixkv.errors import StoreInUseError
from radixkv.tiers.disk import store_folder


def test_the_second_owner_is_refused_with_the_firsts_id(open_tier: OpenTier) -> None:
    owner = f"process {os.getpid()} on {socket.gethostname()}"
    advice = "others take another disk_cache, or read this one with disk_cache_read_only"
    for _ in range(2):
        first = open_tier()
        with pytest.raises(StoreInUseError, match=rf"is written by {owner}, and only one may: {advice}$"):
            open_tier()
        first.close()


def test_who_looks_which_process_writes_keeps_none_from_it(
    open_tier: OpenTier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_tier().close()
    (path,) = tmp_path.glob("store/*/lock")
    with path.open() as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        monkeypatch.setattr(store_folder, "time", SimpleNamespace(sleep=lambda seconds: lock.close()))
        open_tier()


def test_an_owner_whose_lock_was_removed_leaves_the_store_to_the_next(open_tier: OpenTier, tmp_path: Path) -> None:
    """Both wrote, each over what the other had."""
    first = open_tier()
    put(first, KEYS[:2], BLOCKS[:2])
    (lock,) = tmp_path.glob("store/*/lock")
    lock.unlink()
    second = open_tier()
    put(first, prefix_keys("bob", *range(6)))
    assert first.stats.dropped_blocks == 6
    assert np.array_equal(get(first, KEYS), BLOCKS[:2])
    put(second)
    assert np.array_equal(get(second, KEYS), BLOCKS)
    with pytest.raises(StoreInUseError):
        open_tier()


def test_an_owner_whose_lock_was_removed_takes_another(open_tier: OpenTier, tmp_path: Path) -> None:
    tier = open_tier()
    (lock,) = tmp_path.glob("store/*/lock")
    lock.unlink()
    put(tier)
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    with pytest.raises(StoreInUseError):
        open_tier()


def test_a_forked_child_does_not_hold_a_folder(open_tier: OpenTier) -> None:
    """After the owner was killed, its successor used to be refused as long as a child of it lived."""
    first = open_tier()
    ours, theirs = socket.socketpair()
    child = os.fork()
    if not child:
        ours.close()
        theirs.send(b".")
        theirs.recv(1)  # until the test is over
        os._exit(0)
    with ours, theirs:
        assert ours.recv(1)
        with pytest.raises(StoreInUseError):
            open_tier()
        first.close()
        open_tier()
    os.waitpid(child, 0)


def test_a_second_process_may_read_what_the_first_writes(open_tier: OpenTier) -> None:
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


def test_a_reader_may_come_before_the_owner(open_tier: OpenTier, clock: FakeClock) -> None:
    reader = open_tier(read_only=True)
    assert reader.contains_prefix(KEYS) == 0
    put(open_tier())
    clock.now += 1
    assert np.array_equal(get(reader, KEYS), BLOCKS)
