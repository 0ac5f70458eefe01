"""Loads from tiers: what is read is written into the pool at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.tier_model import prefix_keys
from support.time_limit import HANGING

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.host_tier import HostTier
from radixkv.tiers.moves import loader as loader_module
from radixkv.tiers.moves.load import Load, LookUp
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.stack import Span, TierStack


class Rows(PoolRows):
    """Of a pool; block ``i`` is the number that was written to it last, or -1."""

    nbytes, num_blocks = 8, 64

    def __init__(self) -> None:
        self.blocks = np.full(self.num_blocks, -1)

    def prepare(self, block_ids: NDArray[np.int32]) -> None:
        pass

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        self.blocks[block_ids] = data.view(np.int64)[:, 0]


def loader_of(stack: object, rows: PoolRows, num_stored: int = 0) -> BlockLoader:
    """A loader that only reads from a stack."""
    nothing = cast(Any, None)

    def make_buffer(count: int, nbytes: int) -> NDArray[np.uint8]:
        return np.zeros((count, nbytes), np.uint8)

    return BlockLoader(cast(TierStack, stack), nothing, nothing, rows, make_buffer, num_stored)


class SlowRows(Rows):
    """A write ends when reading has failed, and notes whether the load was said to be done by then."""

    def __init__(self, load: Load, failed: threading.Event) -> None:
        super().__init__()
        self._load, self._failed = load, failed
        self.done_before_written: bool | None = None

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        self._failed.wait()
        self.done_before_written = self._load.done.wait(0.1)


class FailingStack:
    """Of which all reads but that of the first chunk raise."""

    def __init__(self, failed: threading.Event) -> None:
        self._failed = failed

    def read(self, span: Span, keys: Sequence[BlockKey], out: NDArray[np.uint8]) -> int:
        if not span.start:
            return len(out)
        self._failed.set()
        raise RuntimeError("a defect")

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        pass


def test_a_load_is_not_done_while_a_chunk_of_it_is_written() -> None:
    """Else its blocks, and the buffer that is copied from, would be used again meanwhile."""
    failed = threading.Event()
    load = Load([], [Span(0, 0, 32)], 0, np.arange(32, dtype=np.int32))
    rows = SlowRows(load, failed)
    loader = loader_of(FailingStack(failed), rows)
    loader.load(load)
    assert load.done.wait(60)
    assert rows.done_before_written is False
    assert load.num_loaded == 8  # nothing of what could not be read
    assert loader.stop(60)


class UnevenStack:
    """Whose block ``i`` is the number i; the first chunk comes after the second, and has only so many blocks."""

    def __init__(self, num_first: int | None) -> None:
        self._num_first = num_first
        self._others = threading.Event()

    def read(self, span: Span, keys: Sequence[BlockKey], out: NDArray[np.uint8]) -> int:
        out.view(np.int64)[:, 0] = np.arange(span.start, span.stop)
        if span.start:
            self._others.set()
            return len(out)
        assert self._others.wait(60)
        return len(out) if self._num_first is None else self._num_first


@pytest.mark.parametrize("num_first", [None, 3, 0])
def test_blocks_are_loaded_up_to_the_first_that_is_missing(num_first: int | None) -> None:
    count = 61
    rows = Rows()
    load = Load([], [Span(0, 0, 40), Span(1, 40, count)], 0, np.arange(count, dtype=np.int32)[::-1].copy())
    loader = loader_of(UnevenStack(num_first), rows)
    loader.load(load)
    assert load.done.wait(60)
    expected = count if num_first is None else num_first
    assert load.num_loaded == sum(blocks for _, blocks, _ in load.read) == expected
    assert rows.blocks[load.block_ids][:expected].tolist() == [*range(expected)]
    assert {tier for tier, _, _ in load.read} == ({0, 1} if num_first is None else {0})
    assert loader.stop(60)


class MeetingRows(Rows):
    """No write ends before another has begun, too."""

    def __init__(self) -> None:
        super().__init__()
        self.both = threading.Barrier(2)

    def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
        self.both.wait(60)


def test_chunks_are_written_at_the_same_time() -> None:
    tier = HostTier(16 * 8, 8)
    keys = prefix_keys("a", *range(16))
    tier.put_many(keys, np.zeros((16, 8), np.uint8))
    loader = loader_of(TierStack([tier]), MeetingRows())
    load = Load(keys, [Span(0, 0, 16)], 0, np.arange(16, dtype=np.int32))
    loader.load(load)
    assert load.done.wait(60)
    assert load.num_loaded == 16
    assert loader.stop(60)


def test_a_load_is_not_cancelled_while_a_later_chunk_of_it_is_written() -> None:
    """The chunk before it hangs. Blocks that are free again must not be written."""
    writing, goes_on = threading.Event(), threading.Event()

    class WaitingRows(Rows):
        def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
            writing.set()
            assert goes_on.wait(60)

    load = Load([], [Span(0, 0, 16)], 0, np.arange(16, dtype=np.int32))
    first, second = Span(0, 0, 8), Span(0, 8, 16)
    rows, data = WaitingRows(), np.zeros((8, 8), np.uint8)
    for chunk in (first, second):
        assert load.begin_chunk(chunk, 0.0)
    writer = threading.Thread(target=load.write, args=(rows, second, data, lambda: 1.0), daemon=True)
    writer.start()
    assert writing.wait(60)
    assert not load.try_cancel()
    goes_on.set()
    writer.join(60)
    assert load.try_cancel()
    writing.clear()
    assert load.write(rows, first, data, lambda: 2.0)
    assert load.done.is_set()
    assert not writing.is_set()
    assert (load.num_loaded, load.read) == (0, [])


def test_a_load_is_cancelled_once_what_is_being_written_of_it_is_written() -> None:
    writing, waiting = threading.Event(), threading.Event()
    written: list[int] = []

    class WaitingRows(Rows):
        def write(self, block_ids: NDArray[np.int32], data: NDArray[np.uint8], fence: object) -> None:
            writing.set()
            assert waiting.wait(60)
            written.extend(block_ids)

    class Condition(threading.Condition):
        def wait_for(self, predicate: Callable[[], Any], timeout: float | None = None) -> Any:
            waiting.set()
            return super().wait_for(predicate, timeout)

    load = Load([], [Span(0, 0, 16)], 0, np.arange(16, dtype=np.int32), _changed=Condition())
    first, second = Span(0, 0, 8), Span(0, 8, 16)
    rows, data = WaitingRows(), np.zeros((8, 8), np.uint8)
    for chunk in (first, second):
        assert load.begin_chunk(chunk, 0.0)
    writer = threading.Thread(target=load.write, args=(rows, first, data, lambda: 1.0), daemon=True)
    writer.start()
    assert writing.wait(60)
    load.cancel()
    assert written == [*range(8)]
    assert load.write(rows, second, data, lambda: 2.0)
    assert len(written) == load.num_loaded == 8
    writer.join(60)


def test_of_a_prefix_that_was_loaded_in_chunks_the_head_stays_longest() -> None:
    """Each chunk was used after the one before it, and the first blocks, which the pool had, were not read at all."""
    tier = HostTier(48 * 8, 8)
    keys = prefix_keys("a", *range(40))
    tier.put_many(keys, np.zeros((40, 8), np.uint8))
    other = prefix_keys("b", *range(8))
    tier.put_many(other, np.zeros((8, 8), np.uint8))
    loader = loader_of(TierStack([tier]), Rows())
    loader.load(Load(keys, [Span(0, 4, 40)], 4, np.arange(36, dtype=np.int32)))
    assert loader.stop(60)
    tier.put_many(prefix_keys("c", *range(20)), np.zeros((20, 8), np.uint8))
    assert tier.contains_prefix(keys) == 28
    assert tier.contains_prefix(other) == 0


def test_of_a_load_behind_another_nothing_is_read_in_vain() -> None:
    """What the tier of the load before took counted as its own tier's."""
    begun, goes_on = threading.Barrier(3), threading.Event()

    class Stack:
        def read(self, span: Span, keys: Sequence[BlockKey], out: NDArray[np.uint8]) -> int:
            if not span.tier:
                begun.wait(60)
                assert goes_on.wait(600)
            return len(out)

        def mark_used(self, prefix: Sequence[BlockKey]) -> None:
            pass

    hanging = Load([], [Span(0, 0, 16)], 0, np.arange(16, dtype=np.int32))  # in both threads
    behind = Load([], [Span(1, 0, 16)], 0, np.arange(16, dtype=np.int32))
    loader = loader_of(Stack(), Rows())
    loader.load(hanging)
    loader.load(behind)
    begun.wait(60)
    assert hanging.in_vain(0.0) is not None
    assert behind.in_vain(0.0) is None
    goes_on.set()
    assert behind.done.wait(60)
    assert behind.in_vain(0.0) is None
    assert loader.stop(60)


def three_chunks() -> tuple[Load, list[Span], Rows, NDArray[np.uint8]]:
    """A load from a tier, its chunks, rows of a pool, and what is read of a chunk."""
    chunks = [Span(1, start, start + 8) for start in (2, 10, 18)]
    return Load([], [Span(1, 2, 26)], 2, np.arange(24, dtype=np.int32)), chunks, Rows(), np.zeros((8, 8), np.uint8)


def test_nothing_is_read_or_written_behind_a_missing_block() -> None:
    load, (first, second, third), rows, data = three_chunks()
    for chunk in (first, second):
        assert load.begin_chunk(chunk, 0.0)
    load.write(rows, second, data[:3], lambda: 1.0)
    assert not load.begin_chunk(third, 1.0)
    assert not load.write(rows, first, data, lambda: 2.0)
    assert load.write(rows, third, data, lambda: 3.0)
    assert load.num_loaded == 11
    assert rows.blocks[:24].tolist() == [0] * 11 + [-1] * 13


def test_time_in_which_two_chunks_are_read_counts_once() -> None:
    load, (first, second, third), rows, data = three_chunks()
    assert load.begin_chunk(first, 10.0)
    assert load.begin_chunk(second, 11.0)
    assert load.in_vain(12.0) == (1, 2.0)
    assert not load.write(rows, second, data, lambda: 13.0)
    assert load.begin_chunk(third, 13.0)
    assert load.in_vain(14.0) == (1, 4.0)
    assert not load.write(rows, first, data, lambda: 15.0)
    assert load.in_vain(17.0) == (1, 2.0)
    assert load.write(rows, third, data, lambda: 18.0)
    assert load.read == [(1, 8, 5.0), (1, 8, 0.0), (1, 8, 3.0)]
    assert load.num_loaded == 24


@pytest.mark.parametrize(
    ("num_stored", "max_bytes", "expected"), [(10, 1 << 30, 10), (100, 1 << 30, 64), (100, 88, 11)]
)
def test_memory_is_prepared_for_what_is_stored_and_for_each_load(
    num_stored: int, max_bytes: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "_PREPARED_BLOCKS", 4)
    monkeypatch.setattr(loader_module, "_MAX_PREPARED_BYTES", max_bytes)
    parts: list[list[int]] = []
    all_prepared = threading.Event()

    class PreparedRows(Rows):
        def prepare(self, block_ids: NDArray[np.int32]) -> None:
            parts.append(block_ids.tolist())
            if sum(map(len, parts)) == expected:
                all_prepared.set()

    loader = loader_of(TierStack([HostTier(8, 8)]), PreparedRows(), num_stored)
    assert all_prepared.wait(HANGING)
    load = Load(prefix_keys("a", *range(8)), [Span(0, 0, 8)], 0, np.arange(40, 48, dtype=np.int32))
    loader.load(load)
    assert load.done.wait(HANGING)
    assert loader.stop(HANGING)
    assert loader.progress.is_set()
    assert [block for part in parts for block in part] == [*range(expected), *range(40, 48)]
    assert all(0 < len(part) <= 4 for part in parts[:-1])


def test_a_look_up_that_fails_finds_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """Whoever waits for it computes at once."""
    loader, look_up = loader_of(TierStack([HostTier(8, 8)]), Rows()), LookUp("", bytes(16), 0)
    loader.look_up(look_up)  # there is no writer, and an error
    assert look_up.done.wait(HANGING)
    assert look_up.spans == []
    assert loader.stop(HANGING)
    assert loader.progress.is_set()
    assert len(caplog.records) == 1
