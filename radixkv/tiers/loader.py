"""Finds and reads prefixes in tiers in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue

import numpy as np
from numpy.typing import NDArray

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.pool_rows import PoolRows
from radixkv.tiers.prefix_keys import PrefixKeys
from radixkv.tiers.stack import Span, TierStack
from radixkv.tiers.tier import BlockBytes
from radixkv.tiers.worker import Worker
from radixkv.tiers.writer import BlockWriter, PrefixBlocks

# Read and written at once: few enough to stay in the processor's caches in between, many enough for a disk to be fast.
_CHUNK_BLOCKS = 8
# Threads that take chunks: while one is at a disk, the other copies.
_NUM_READERS = 2
# Of a pool's memory, what is made ready at most when nothing is loaded yet; and how much of it before a load's own is.
_MAX_PREPARED_BYTES = 1 << 30
_PREPARED_BLOCKS = 64
# Steps take memory from the system, too, one after the other with this: for each second of it, so many are left to them.
_PREPARING_PAUSE = 4


@dataclass(eq=False, slots=True)
class LookUp:
    """Where a prefix lies below.

    Attributes:
        start: the first block that was asked for.
        keys: of the prefix's blocks; set with ``spans``.
        spans: of the blocks from ``start`` on; None while they are looked for.
        waits_for_writer: whether nobody looks for them until what is on its way down is written.
        done: is set when they are known.
    """

    namespace: str
    tokens: bytes
    start: int
    keys: list[BlockKey] = field(default_factory=list)
    spans: list[Span] | None = None
    waits_for_writer: bool = False
    done: threading.Event = field(default_factory=threading.Event)


@dataclass(eq=False, slots=True)
class Load:
    """Blocks of one prefix on their way into the pool.

    Attributes:
        keys: of the prefix's blocks.
        spans: where they are read.
        first: the index of the first one.
        block_ids: where they are written, int32.
        fence: see `PoolRows.write`.
        num_loaded: blocks that are in the pool.
        read: for each tier that was read: blocks and seconds.
        cancelled: whether no chunk more is written.
        done: is set when nothing more of it will be written.
    """

    keys: Sequence[BlockKey]
    spans: Sequence[Span]
    first: int
    block_ids: NDArray[np.int32]
    fence: object = None
    num_loaded: int = 0
    read: list[tuple[int, int, float]] = field(default_factory=list)
    cancelled: bool = False
    done: threading.Event = field(default_factory=threading.Event)
    _changed: threading.Condition = field(default_factory=threading.Condition)  # of what follows
    _num_wanted: int = 0  # blocks before the first one that is missing
    _num_writing: int = 0  # chunks
    # Of the chunks that are read or written, by their first block: the tier, and when reading began.
    _begun: dict[int, tuple[int, float]] = field(default_factory=dict)
    # Of those that are behind one of these: the blocks that were written, and when the last was.
    _finished: dict[int, _Finished] = field(default_factory=dict)
    _num_tried: int = 0  # blocks that were written or are lost, with all before them
    _tried_at: float = 0.0  # when the last of them was

    def __post_init__(self) -> None:
        self._num_wanted = len(self.block_ids)

    def begin_chunk(self, chunk: Span, began: float) -> bool:
        """A chunk begins to be read; False: it need not be."""
        start = chunk.start - self.first
        self._begun[start] = (chunk.tier, began)
        return self._wants(start)

    def in_vain(self, now: float) -> tuple[int, float] | None:
        """The tier that is read for the next blocks, and for how long it has been; None: loads before this one are read."""
        begun = self._begun.get(self._num_tried)
        return None if begun is None else (begun[0], now - max(begun[1], self._tried_at))

    def cancel(self) -> None:
        """Write nothing more from now on; waits for chunks that are being written, which takes no medium."""
        with self._changed:
            self.cancelled = True
            self._changed.wait_for(lambda: not self._num_writing)

    def try_cancel(self) -> bool:
        """Write no chunk more from now on; False: one is being written, and `done` or a later call says when it is."""
        with self._changed:
            self.cancelled = True
            return not self._num_writing

    def write(self, rows: PoolRows, chunk: Span, blocks: BlockBytes, clock: Callable[[], float]) -> bool:
        """Write what was read of a chunk, unless the load has ended. Several threads write chunks at the same time.

        Args:
            rows: of the pool.
            chunk: that was begun.
            blocks: the leading ones that were there; the load ends with them if there are fewer than the chunk's.
            clock: seconds.

        Returns:
            Whether the load is done.
        """
        start, stop = chunk.start - self.first, chunk.stop - self.first
        with self._changed:
            wanted = self._wants(start)
            self._num_writing += wanted
        num_written = 0
        try:
            if wanted and len(blocks):
                rows.write(self.block_ids[start : start + len(blocks)], blocks, self.fence)
                num_written = len(blocks)
        finally:
            with self._changed:
                self._num_writing -= wanted
                if num_written < stop - start:
                    self._num_wanted = min(self._num_wanted, start + num_written)
                self._finished[start] = _Finished(stop, num_written, wanted, clock())
                self._count()
                self._changed.notify_all()
                is_done = self._num_tried == len(self.block_ids)
                if is_done:
                    self.done.set()
        return is_done

    def _wants(self, start: int) -> bool:
        return not self.cancelled and start < self._num_wanted

    def _count(self) -> None:
        """Count the chunks that have finished with all before them; of two that were read at once, the time counts once."""
        while (finished := self._finished.pop(self._num_tried, None)) is not None:
            tier, began = self._begun.pop(self._num_tried)
            if finished.wanted and self.num_loaded == self._num_tried:  # else blocks before these are missing
                self.num_loaded += finished.num_written
                seconds = max(0.0, finished.at - max(began, self._tried_at))
                self.read.append((tier, finished.num_written, seconds))
            self._num_tried = finished.stop
            self._tried_at = max(self._tried_at, finished.at)


@dataclass(frozen=True, slots=True)
class _Finished:
    """A chunk of a load: where the next one begins, how many blocks were written, whether any should be, and when."""

    stop: int
    num_written: int
    wanted: bool
    at: float


class BlockLoader:
    """Threads of its own, so that no look-up waits for a medium that reads, nor what is read for memory to be ready.

    Args:
        stack: where blocks are read.
        writer: puts blocks there.
        keys: makes their keys.
        rows: of the pool into which they are written.
        make_buffer: an array of ``(blocks, bytes of a block)``; for a GPU in pinned memory.
        num_stored: blocks that tiers hold already, as far as is known: for so many, memory is made ready now.
        clock: seconds.

    Attributes:
        progress: is set when a look-up or a load is done; the waiting thread clears it.
    """

    def __init__(
        self,
        stack: TierStack,
        writer: BlockWriter,
        keys: PrefixKeys,
        rows: PoolRows,
        make_buffer: Callable[[int, int], BlockBytes],
        num_stored: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = threading.Event()
        self._stack = stack
        self._writer = writer
        self._keys = keys
        self._rows = rows
        self._buffers: SimpleQueue[BlockBytes] = SimpleQueue()  # those that no reader has
        for _ in range(_NUM_READERS):
            self._buffers.put(make_buffer(_CHUNK_BLOCKS, rows.nbytes))
        self._clock = clock
        self._finder = Worker("radixkv-tier-finder")
        self._readers = Worker("radixkv-tier-reader", _NUM_READERS)
        self._preparer = Worker("radixkv-tier-memory")
        self._early_preparer = Worker("radixkv-tier-early-memory")
        self._num_prepared = min(num_stored, rows.num_blocks, _MAX_PREPARED_BYTES // rows.nbytes)
        self._prepare_some(0)

    def look_up(self, look_up: LookUp) -> None:
        """Begin to look for a prefix."""
        self._finder.submit(partial(self._find, look_up, wait=True))

    def load(self, load: Load) -> None:
        """Begin to load; nothing else may use the blocks until it is done."""
        self._preparer.submit(partial(self._rows.prepare, load.block_ids))
        for chunk in _chunks(load.spans):
            self._readers.submit(partial(self._read, load, chunk))

    def stop(self, timeout: float) -> bool:
        """End the threads; returns whether that took no longer than ``timeout`` seconds in all."""
        deadline = self._clock() + timeout
        finished = True
        for worker in (self._finder, self._readers, self._preparer, self._early_preparer):
            finished &= worker.stop(max(0.0, deadline - self._clock()))
        return finished

    def _prepare_some(self, start: int) -> None:
        """Make the pool's memory ready from a block on: what is loaded first after a restart should not wait for it."""
        stop = min(start + _PREPARED_BLOCKS, self._num_prepared)
        if start < stop:
            self._early_preparer.submit(partial(self._prepare, start, stop))

    def _prepare(self, start: int, stop: int) -> None:
        began = time.monotonic()
        self._rows.prepare(np.arange(start, stop, dtype=np.int32))
        time.sleep(_PREPARING_PAUSE * (time.monotonic() - began))
        self._prepare_some(stop)

    def _find(self, look_up: LookUp, *, wait: bool) -> None:
        """Look for a prefix. What is missing may be on its way down: then, once, look again when it has been written."""
        spans: list[Span] = []
        look_up.waits_for_writer = False
        try:
            queued = (
                self._writer.queued() if wait else []
            )  # before the tiers are asked: what is written meanwhile is in both
            look_up.keys = self._keys.of(look_up.namespace, look_up.tokens)
            spans = self._stack.find(look_up.keys, look_up.start)
            missing = spans[-1].stop if spans else look_up.start
            # They are written in this order: when the last one is, all are.
            for blocks in reversed(queued) if missing < len(look_up.keys) else []:
                if any(self._has_some(part, look_up, missing) for part in blocks.parts):
                    look_up.waits_for_writer = True
                    again = partial(self._find, look_up, wait=False)
                    self._writer.when_written(blocks, partial(self._finder.submit, again))
                    return
        except BaseException:
            self._answer(look_up, [])
            raise
        self._answer(look_up, spans)

    def _has_some(self, part: PrefixBlocks, look_up: LookUp, missing: int) -> bool:
        """Whether some of the prefix's blocks from ``missing`` on are in the part."""
        index = max(missing, part.start)
        prefix = look_up.tokens[: (index + 1) * self._keys.block_bytes]
        return index < len(look_up.keys) and part.has(look_up.namespace, prefix, index)

    def _answer(self, look_up: LookUp, spans: list[Span]) -> None:
        look_up.spans = spans
        look_up.done.set()
        self.progress.set()

    def _read(self, load: Load, chunk: Span) -> None:
        buffer = self._buffers.get()
        try:
            is_done = self._read_with(buffer[: chunk.stop - chunk.start], load, chunk)
        finally:
            self._buffers.put(buffer)
            if load.done.is_set():
                self.progress.set()
        if is_done:
            self._stack.mark_used(load.keys[: load.first + load.num_loaded])

    def _read_with(self, buffer: BlockBytes, load: Load, chunk: Span) -> bool:
        """Returns whether the load is done."""
        found = 0
        try:
            if load.begin_chunk(chunk, self._clock()):
                found = self._stack.read(chunk, load.keys, buffer)
        finally:
            is_done = load.write(self._rows, chunk, buffer[:found], self._clock)
        return is_done


def _chunks(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        for start in range(span.start, span.stop, _CHUNK_BLOCKS):
            yield Span(span.tier, start, min(start + _CHUNK_BLOCKS, span.stop))
