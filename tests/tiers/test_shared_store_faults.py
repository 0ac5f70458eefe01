"""A tier over a store that fails, is full, or hangs: what it asks of it meanwhile, and what becomes of a clear."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.disk_tiers import BLOCKS, KEYS, put
from support.tier_model import FORMAT, FakeClock, get, prefix_keys

from radixkv.tiers import medium_queue
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.shared_tier import BlobStore, SharedTier


class FailingStore:
    """Passes calls on, unless it is to fail."""

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


def test_a_store_that_is_gone_is_warned_of_once_and_tried_seldom(
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


def test_a_store_that_is_read_again_is_logged_as_working(
    failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    for ask in (lambda: len(get(tier, KEYS)), lambda: tier.contains_prefix(KEYS)):
        caplog.clear()
        failing.failing = True
        assert ask() == 0
        failing.failing = False
        clock.now += 60
        assert ask() == 6
        assert [message.partition(". ")[0] for message in caplog.messages] == [
            "reading a store: gone",
            "reading a store: works again",
        ]
    tier.close()


def test_a_store_whose_blocks_are_found_but_cannot_be_read_is_warned_of_once(
    failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """Files that may not be read can be looked up: each look-up was taken for a store that works again."""
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    put(tier)
    with mock.patch.object(failing.store, "read", side_effect=OSError("unreadable")):
        for _ in range(5):
            assert tier.contains_prefix(KEYS) == 6
            assert len(get(tier, KEYS)) == 0
            clock.now += 60
    assert len(caplog.messages) == 1
    assert np.array_equal(get(tier, KEYS), BLOCKS)
    assert caplog.messages[1:] == ["reading a store: works again"]
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


def test_a_store_that_stays_gone_is_not_cleared_anew_at_each_read(failing: FailingStore) -> None:
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


def test_a_store_that_clears_what_it_had_refused_works_again(
    failing: FailingStore, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on being left alone for longer each time, and its next failure was not warned of."""
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    for _ in range(2):
        caplog.clear()
        failing.clears_nothing = True
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
        failing.clears_nothing = False
        clock.now += 1
        assert tier.contains_prefix(prefix_keys("bob", 1)) == 0
        assert tier.flush(600)
        assert caplog.messages == [
            "writing a store: gone. Going on without it; it is retried from time to time.",
            "writing a store: works again",
        ]
    tier.close()


def test_a_full_store_that_clears_is_warned_of_once(failing: FailingStore, caplog: pytest.LogCaptureFixture) -> None:
    """Each clear counted as if it worked again, and was followed by another warning."""
    clock = FakeClock()
    tier = SharedTier(failing, FORMAT, clock=clock)
    failing.is_full = True
    for block in range(5):
        put(tier, prefix_keys("bob", block), BLOCKS[:1])
        clock.now += 60
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
    assert len(caplog.messages) == 1
    tier.close()


def test_reads_beside_a_clear_that_hangs_queue_one_more_at_most(failing: FailingStore) -> None:
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


def test_what_is_used_beside_a_store_that_hangs_takes_bounded_memory(
    failing: FailingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of each prefix that was used were kept until it answered: in a night, gigabytes."""
    monkeypatch.setattr(medium_queue, "_MAX_DROPPABLE", 5)
    began, let_go = threading.Event(), threading.Event()

    def hang(blobs: object) -> int:
        began.set()
        assert let_go.wait(600)
        return 0

    tier = SharedTier(failing, FORMAT)
    with mock.patch.object(failing.store, "write", hang), mock.patch.object(failing.store, "mark_used") as mark_used:
        tier.put_many(KEYS, BLOCKS)
        assert began.wait(600)
        prefixes = [prefix_keys("bob", number) for number in range(20)]
        for prefix in prefixes:
            tier.mark_used(prefix)
        assert len(tier._writer._queue) == 5
        let_go.set()
        assert tier.flush(600)
        tier.mark_used(KEYS)
        tier.close()
        tier.mark_used(KEYS)
        assert not tier._writer._droppable
    marked = [*prefixes[-5:], KEYS]  # what was used last
    assert [call.args[0] for call in mark_used.call_args_list] == [[tier._name(key) for key in keys] for keys in marked]
