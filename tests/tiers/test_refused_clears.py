"""What a disk refused to clear is cleared once it works again, or warned of."""

from __future__ import annotations

import errno
import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from unittest import mock

import pytest
from support.disk_tiers import BLOCKS, BOB, KEYS, OpenTier, pin_of, put
from support.tier_model import FakeClock, prefix_keys

from radixkv.tiers.disk.slot_files import SlotFiles
from radixkv.tiers.disk.slot_index import SlotIndex


def test_a_clear_that_the_disk_refused_is_made_up_for(open_tier: OpenTier, clock: FakeClock) -> None:
    tier = open_tier()
    put(tier)
    with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
        tier.clear(KEYS[0].namespace)
    assert tier.contains_prefix(KEYS) == 0
    tier.close()
    assert open_tier().contains_prefix(KEYS) == 0


@pytest.mark.parametrize("refused", ["clear", "change_pins"])
def test_what_the_disk_refused_to_clear_is_cleared_although_nothing_is_written(
    open_tier: OpenTier, clock: FakeClock, tmp_path: Path, refused: str
) -> None:
    """A process that only read did not try again: had it been killed, what it had cleared would have been found again."""
    tier = open_tier()
    put(tier)
    tier.pins.add(pin_of(KEYS[0]))
    assert tier.flush(600)
    error = sqlite3.OperationalError("database or disk is full")
    with mock.patch.object(SlotIndex, refused, side_effect=error) as refusing:
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
        num_tries = refusing.call_count
        assert tier.contains_prefix(KEYS) == 0
        assert tier.flush(600)
        assert refusing.call_count == num_tries  # a failed disk is left alone for a while
    clock.now += 60
    assert tier.contains_prefix(KEYS) == 0
    assert tier.flush(600)
    (folder,) = tmp_path.glob("store/*")
    with closing(SlotIndex(folder, writable=False)) as index:
        assert index.all() == index.pins() == []


def test_a_disk_that_clears_what_it_had_refused_works_again(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It went on being left alone for longer each time, and its next failure was not warned of."""
    tier = open_tier()
    put(tier)
    for _ in range(2):
        caplog.clear()
        with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
            tier.clear(KEYS[0].namespace)
            assert tier.flush(600)
        clock.now += 1
        assert tier.contains_prefix(KEYS) == 0
        assert tier.flush(600)
        assert [message.rpartition(": ")[2] for message in caplog.messages] == [
            "disk I/O error. Going on without it; it is retried from time to time.",
            "works again",
        ]


def test_a_disk_that_clears_before_its_thread_comes_to_it_works_again(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """What the thread that clears had done by then did not count."""
    tier, let_go = open_tier(), threading.Event()
    put(tier)
    with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
    clock.now += 1
    assert tier._writer is not None
    tier._writer._writer.call(mock.Mock(side_effect=let_go.wait))
    tier.clear(BOB[0].namespace)
    let_go.set()
    assert tier.flush(600)
    assert caplog.messages[-1].endswith("works again")


def test_a_disk_that_clears_but_takes_no_blocks_is_warned_of_once(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    tier = open_tier()
    put(tier)
    with mock.patch.object(SlotFiles, "write", side_effect=OSError(errno.ENOSPC, "no space left")):
        for block in range(5):
            put(tier, prefix_keys("bob", block), BLOCKS[:1])
            tier.pins.add(pin_of(KEYS[0]))
            tier.clear(BOB[0].namespace)
            assert tier.flush(600)
            clock.now += 60
    assert len(caplog.messages) == 1


def test_reads_beside_a_clear_that_hangs_queue_one_more_at_most(open_tier: OpenTier, clock: FakeClock) -> None:
    tier, began, let_go = open_tier(), threading.Event(), threading.Event()
    put(tier)

    def hang(index: SlotIndex, namespace: bytes | None) -> None:
        began.set()
        assert let_go.wait(600)

    with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
        tier.clear(KEYS[0].namespace)
        assert tier.flush(600)
    clock.now += 60
    with mock.patch.object(SlotIndex, "clear", hang):
        tier.contains_prefix(KEYS)
        assert began.wait(600)
        for _ in range(10):
            tier.contains_prefix(KEYS)
        assert tier._writer is not None
        assert len(tier._writer._writer._queue) <= 1
        let_go.set()
        assert tier.flush(600)


def test_a_clear_that_a_disk_never_carried_out_is_warned_of(
    open_tier: OpenTier, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    """The process ended in silence, and the namespace was found again."""
    tier = open_tier()
    put(tier)
    with mock.patch.object(SlotIndex, "clear", side_effect=sqlite3.OperationalError("disk I/O error")):
        tier.clear(KEYS[0].namespace)
        tier.close()
    assert caplog.messages[-1].endswith("what was cleared is still there: clear it again once it works")
    caplog.clear()
    tier = open_tier()
    tier.clear(KEYS[0].namespace)
    tier.close()
    assert not caplog.messages
