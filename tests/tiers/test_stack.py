"""Several tiers as one: a tier that breaks its promise is treated as one that fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.dict_tier import DictTier, PartlyFilledDictTier
from support.disk_tiers import tier_in
from support.tier_model import FORMAT, partly_filled, prefix_keys
from support.time_limit import HANGING

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.folder_blobs import FolderBlobs
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.shared_tier import SharedTier
from radixkv.tiers.stack import Span, TierStack
from radixkv.tiers.stats import StoreStats
from radixkv.tiers.tier import BlockBytes

KEYS = prefix_keys("a", *range(3))


class AnsweringTier(DictTier):
    """Returns a given value as what it has, and as what it has read."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def contains_prefix(self, keys: Sequence[BlockKey]) -> Any:
        return self.answer

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> Any:
        return self.answer


@pytest.mark.parametrize("answer", [-1, 4, 1.5, 2.0, "2", None, True, np.float32(1)])
@pytest.mark.parametrize("method", ["contains_prefix", "get_many"])
def test_an_impossible_count_of_a_tier_counts_as_none_and_is_logged_once(
    method: str, answer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A tier's -1, an error as in C, used to put undefined bytes into the pool; 1.5 raised an error through the step."""
    nearer = DictTier()
    stack = TierStack([nearer, AnsweringTier(answer)])
    out = np.zeros((3, 8), np.uint8)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            if method == "contains_prefix":
                assert stack.find(KEYS) == []
            else:
                assert stack.read(Span(1, 0, 3), KEYS, out) == 0
    assert not nearer.blocks
    (record,) = caplog.records
    assert f"{method}: expected a whole number from 0 to 3, got {answer!r}" in record.getMessage()


def test_a_load_that_brought_nothing_marks_nothing_as_used_and_fails_no_tier(caplog: pytest.LogCaptureFixture) -> None:
    host = HostTier(80, 8)
    with caplog.at_level(logging.WARNING):
        TierStack([host]).mark_used([])
    assert not caplog.records


@pytest.mark.parametrize("answer", [0, 2, 3, np.int64(2)])
def test_an_answer_may_be_any_whole_number_of_blocks(answer: Any) -> None:
    stack = TierStack([AnsweringTier(answer)])
    assert stack.find(KEYS) == ([Span(0, 0, int(answer))] if answer else [])
    found = stack.read(Span(0, 0, 3), KEYS, np.zeros((3, 8), np.uint8))
    assert found == answer
    assert type(found) is int


class LateTier(DictTier):
    """Never has all that was put."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float] = []

    def flush(self, timeout: float) -> bool:
        self.waits.append(timeout)
        return False


def test_a_tier_that_is_late_is_waited_for_once() -> None:
    late = LateTier()
    stack = TierStack([DictTier(), late])
    assert not stack.flush(5.0)
    assert not stack.flush(5.0)
    assert late.waits == [5.0, 0.0]


class FullTier(DictTier):
    """Can be read, and not be written."""

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        raise OSError("no space left")


class UnreadableTier(DictTier):
    """Knows what it has, and cannot read it."""

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        raise OSError("cannot be read")


@pytest.mark.parametrize(
    ("tier", "expected"),
    [
        (FullTier(), "the dict tier failed in put_many, and does not keep what is put: OSError('no space left')"),
        (UnreadableTier(), "the dict tier failed in get_many, and is treated as empty: OSError('cannot be read')"),
    ],
)
def test_a_tier_of_which_one_method_fails_is_logged_once(
    tier: DictTier, expected: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The methods that worked in between made every failure a new one: of a full store, each write was in the log."""
    stack = TierStack([tier])
    blocks = np.ones((3, 8), np.uint8)
    for _ in range(3):
        stack.write(KEYS, blocks, stack.num_clears(KEYS[0].namespace))
        stack.find(KEYS)
        assert stack.read(Span(0, 0, 3), KEYS, blocks.copy()) == 0
    (record,) = caplog.records
    assert record.getMessage() == expected


class UnendingTier(DictTier):
    """Keeps blocks, and fails at all else."""

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        raise OSError("gone")

    def flush(self, timeout: float | None = None) -> bool:
        raise OSError("gone")

    def close(self) -> None:
        raise OSError("gone")


def test_the_log_has_the_effect_of_each_method_that_fails(caplog: pytest.LogCaptureFixture) -> None:
    """A tier that could not be closed was said to be treated as empty."""
    stack = TierStack([UnendingTier()])
    stack.mark_used(KEYS)
    assert not stack.flush(1.0)
    assert stack.close(HANGING)
    assert [record.getMessage().split("failed in ")[1] for record in caplog.records] == [
        "mark_used, and may evict what was used last: OSError('gone')",
        "flush, and may not have written all: OSError('gone')",
        "close, and may not be closed: OSError('gone')",
    ]


class LendingFullTier(DictTier):
    """Can be given blocks, and not be lent any."""

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        raise OSError("no space left")


def test_what_is_put_does_not_hide_that_nothing_can_be_lent(caplog: pytest.LogCaptureFixture) -> None:
    """Both counted as one method, so each write after a read from a farther tier was a new failure."""
    stack = TierStack([LendingFullTier(), DictTier()])
    blocks = np.ones((3, 8), np.uint8)
    for _ in range(3):
        stack.write(KEYS, blocks, stack.num_clears(KEYS[0].namespace))
        assert stack.read(Span(1, 0, 3), KEYS, blocks.copy()) == 3
    (record,) = caplog.records
    assert record.getMessage() == (
        "the dict tier failed in borrow_many, and does not keep what is put: OSError('no space left')"
    )


def test_a_put_of_nothing_that_a_tier_keeps_is_none_that_works(caplog: pytest.LogCaptureFixture) -> None:
    stack = TierStack([FullTier()])
    part = partly_filled(KEYS[-1], 3)
    for keys in (KEYS, [part], KEYS):
        stack.write(keys, np.ones((len(keys), 8), np.uint8), stack.num_clears(part.namespace))
    assert len(caplog.records) == 1


class MiscountingTier(DictTier):
    """Its counters are a given value, or cannot be read."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: Any = StoreStats(hit_blocks=3)

    @property
    def stats(self) -> StoreStats:
        if isinstance(self.counters, Exception):
            raise self.counters
        counters: StoreStats = self.counters
        return counters


@pytest.mark.parametrize("counters", [ConnectionError("the store is gone"), None, {"hit_blocks": 4}])
def test_counters_that_cannot_be_read_stay_what_they_were_and_that_is_logged_once(
    counters: Any, caplog: pytest.LogCaptureFixture
) -> None:
    tier = MiscountingTier()
    stack = TierStack([DictTier(), tier])
    assert stack.stats == (StoreStats(), StoreStats(hit_blocks=3))
    tier.counters = counters
    for _ in range(2):
        assert stack.stats == (StoreStats(), StoreStats(hit_blocks=3))
        assert stack.find(KEYS) == []  # nothing else of it fails, and that is not said
    (record,) = caplog.records
    assert "the dict tier failed in stats, and its last counters are reported" in record.getMessage()
    tier.counters = StoreStats(hit_blocks=5)
    assert stack.stats == (StoreStats(), StoreStats(hit_blocks=5))


def test_reading_from_the_nearest_tier_does_not_wait_for_what_is_put() -> None:
    out, read_meanwhile = np.zeros((3, 8), np.uint8), list[bool]()

    class ReadWhilePutting(DictTier):
        def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
            super().put_many(keys, blocks)
            reader = threading.Thread(target=stack.read, args=(Span(0, 0, 3), KEYS, out), daemon=True)
            reader.start()
            reader.join(600)
            read_meanwhile.append(not reader.is_alive())

    stack = TierStack([ReadWhilePutting()])
    stack.write(KEYS, np.full((3, 8), 7, np.uint8), stack.num_clears(KEYS[0].namespace))
    assert read_meanwhile == [True]
    assert (out == 7).all()


def test_a_tier_is_not_searched_for_what_nearer_ones_have() -> None:
    nearer, farther = DictTier(), DictTier()
    nearer.put_many(KEYS, np.zeros((3, 8), np.uint8))
    with mock.patch.object(farther, "contains_prefix") as asked:
        assert TierStack([nearer, farther]).find(KEYS) == [Span(0, 0, 3)]
    asked.assert_not_called()


def test_a_tier_of_whole_blocks_is_not_given_a_partly_filled_one_even_alone() -> None:
    tier = DictTier()
    with mock.patch.object(tier, "put_many") as put_many:
        stack, last = TierStack([tier]), partly_filled(KEYS[-1], 2)
        stack.write([last], np.zeros((1, 8), np.uint8), stack.num_clears(last.namespace))
    put_many.assert_not_called()


class AskedTier(PartlyFilledDictTier):
    """Notes of how many partly filled blocks it was asked which is there."""

    def __init__(self, *keys: BlockKey) -> None:
        super().__init__()
        self.put_many(keys, np.zeros((len(keys), 8), np.uint8))
        self.asked: list[int] = []

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        self.asked.append(len(keys))
        return super().first_present(keys)


def test_of_a_partly_filled_block_the_longest_is_found_and_of_equals_the_nearest() -> None:
    lengths = [partly_filled(KEYS[-1], num_tokens) for num_tokens in (3, 2, 1)]
    for near, far, num_tiers, found, asked in (
        ([], [], 3, None, [3]),
        ([0], [0, 1], 3, (1, lengths[0]), []),
        ([1], [0], 3, (2, lengths[0]), [1]),
        ([1], [1], 3, (1, lengths[1]), [1]),
        ([2], [0], 2, (1, lengths[2]), []),
    ):
        nearer, farther = (AskedTier(*(lengths[row] for row in rows)) for rows in (near, far))
        stack = TierStack([DictTier(), nearer, farther])
        assert stack.keeps_partly_filled is True
        assert stack.find_first(lengths, num_tiers) == found
        assert (nearer.asked, farther.asked) == ([3], asked)


def test_no_more_blocks_are_found_than_keys_were_given() -> None:
    assert TierStack([AnsweringTier(3)]).find(KEYS, 1) == []


@pytest.mark.parametrize("is_all", [(False,), (True,), (False, True)])
def test_what_was_queued_before_it_was_cleared_is_not_put_afterwards(is_all: tuple[bool, ...]) -> None:
    tier, namespace = DictTier(), KEYS[0].namespace
    stack = TierStack([tier])
    before = stack.num_clears(namespace)
    for each in is_all:
        stack.clear(None if each else namespace)
    stack.write(KEYS, np.zeros((3, 8), np.uint8), before)
    assert not tier.blocks
    stack.write(KEYS, np.zeros((3, 8), np.uint8), stack.num_clears(namespace))
    assert len(tier.blocks) == 3


class BorrowingTier(DictTier):
    """Counts what it may keep in the caller's memory until it is flushed."""

    num_borrowed = 0

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        assert not blocks.flags.writeable
        super().put_many(keys, blocks)

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self.num_borrowed += len(keys)
        self.put_many(keys, blocks)


def test_what_a_farther_tier_has_is_copied_to_nearer_ones_and_what_is_written_is_lent() -> None:
    """The memory into which blocks are read is that of the next ones at once."""
    near, far, blocks = BorrowingTier(), DictTier(), np.arange(24, dtype=np.uint8).reshape(3, 8)
    far.put_many(KEYS, blocks)
    stack, out = TierStack([near, far]), np.empty((3, 8), np.uint8)
    (span,) = stack.find(KEYS)
    assert stack.read(span, KEYS, out) == 3
    assert near.blocks == far.blocks
    assert near.num_borrowed == 0
    assert out.flags.writeable
    stack.clear(KEYS[0].namespace)
    assert not near.blocks
    assert not far.blocks
    stack.write(KEYS, blocks, stack.num_clears(KEYS[0].namespace))
    assert near.num_borrowed == len(near.blocks) == len(far.blocks) == 3


def test_each_outage_of_a_tier_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    tier = DictTier()
    stack = TierStack([tier])
    for num_warnings in (1, 2):
        tier.fault = "is gone"
        for _ in range(3):
            assert not stack.find(KEYS)
        assert len(caplog.records) == num_warnings
        tier.fault = None
        stack.find(KEYS)


def test_no_thread_of_closed_tiers_stays(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    store = FolderBlobs(tmp_path / "shared", capacity_bytes=1 << 20)
    stack = TierStack([HostTier(1 << 10, FORMAT.block_bytes), tier_in(tmp_path), SharedTier(store, FORMAT)])
    stack.write(KEYS, np.zeros((3, FORMAT.block_bytes), np.uint8), stack.num_clears(KEYS[0].namespace))
    stack.clear(None)
    assert len(set(threading.enumerate()) - before) >= 4
    assert stack.close(HANGING)
    for thread in set(threading.enumerate()) - before:
        thread.join(HANGING)
        assert not thread.is_alive()
