"""Finds and reads prefixes in tiers in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

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
# Threads that take chunks in turn: while one writes a chunk, the other reads the next.
_NUM_READERS = 2
# Of a pool's memory, what is made ready at most when nothing is loaded yet; and how much of it before a load's own is.
_MAX_PREPARED_BYTES = 1 << 30
_PREPARED_BLOCKS = 64


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
        done: is set when nothing more of it will be written.
    """

    keys: Sequence[BlockKey]
    spans: Sequence[Span]
    first: int
    block_ids: NDArray[np.int32]
    fence: object = None
    num_loaded: int = 0
    read: list[tuple[int, int, float]] = field(default_factory=list)
    done: threading.Event = field(default_factory=threading.Event)
    _ended: bool = False
    _turn: threading.Condition = field(default_factory=threading.Condition)
    # Of the chunks that are read or wait for their turn, by their first block: the tier, and when reading began.
    _reading: dict[int, tuple[int, float]] = field(default_factory=dict)
    _num_tried: int = 0  # blocks that were written or are lost
    _tried_at: float = 0.0  # when the last of them was

    @property
    def ended(self) -> bool:
        """Whether it was cancelled, or a block was missing."""
        return self._ended

    def begin_chunk(self, chunk: Span, began: float) -> None:
        """A chunk begins to be read."""
        self._reading[chunk.start - self.first] = (chunk.tier, began)

    def in_vain(self, now: float) -> tuple[int, float] | None:
        """The tier that is read for the next blocks, and for how long it has been; None: loads before this one are read.

        Waits for no chunk that is being written.
        """
        reading = self._reading.get(self._num_tried)
        return None if reading is None else (reading[0], now - max(reading[1], self._tried_at))

    def cancel(self) -> None:
        """Write nothing more from now on; waits for a chunk that is being written, which takes no medium."""
        with self._turn:
            self._ended = True

    def try_cancel(self) -> bool:
        """Write no chunk more from now on; False: one is being written, and `done` or a later call says when it is."""
        self._ended = True
        if not self._turn.acquire(blocking=False):
            return False
        self._turn.release()
        return True

    def write(self, rows: PoolRows, chunk: Span, blocks: BlockBytes, began: float, clock: Callable[[], float]) -> bool:
        """Write what was read of a chunk when the chunks before it are written, unless the load has ended.

        Args:
            rows: of the pool.
            chunk: of one of the spans.
            blocks: the leading ones that were there; the load ends with them if there are fewer than the chunk's.
            began: when reading the chunk began.
            clock: seconds.

        Returns:
            Whether it was the last one.
        """
        start, stop = chunk.start - self.first, chunk.stop - self.first
        with self._turn:
            self._turn.wait_for(lambda: self._num_tried == start)
            is_whole = False
            try:
                if not self._ended:
                    if len(blocks):
                        rows.write(self.block_ids[start : start + len(blocks)], blocks, self.fence)
                    is_whole = len(blocks) == stop - start
                    self.num_loaded += len(blocks)
                    now = clock()
                    # Of two chunks that were read at the same time, the time counts once.
                    self.read.append((chunk.tier, len(blocks), now - max(began, self._tried_at)))
                    self._tried_at = now
            finally:
                if not is_whole:  # else it may have been cancelled meanwhile
                    self._ended = True
                self._num_tried = stop
                self._reading.pop(start, None)
                self._turn.notify_all()
                is_last = stop == len(self.block_ids)
                if is_last:
                    self.done.set()
        return is_last


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
        self._buffers = [make_buffer(_CHUNK_BLOCKS, rows.nbytes) for _ in range(_NUM_READERS)]
        self._clock = clock
        self._finder = Worker("radixkv-tier-finder")
        self._readers = [Worker(f"radixkv-tier-reader-{number}") for number in range(_NUM_READERS)]
        self._preparer = Worker("radixkv-tier-memory")
        self._num_prepared = min(num_stored, rows.num_blocks, _MAX_PREPARED_BYTES // rows.nbytes)
        self._prepare_some(0)

    def look_up(self, look_up: LookUp) -> None:
        """Begin to look for a prefix."""
        self._finder.submit(partial(self._find, look_up, wait=True))

    def load(self, load: Load) -> None:
        """Begin to load; nothing else may use the blocks until it is done."""
        self._preparer.submit(partial(self._rows.prepare, load.block_ids))
        for number, chunk in enumerate(_chunks(load.spans)):
            reader = number % _NUM_READERS
            self._readers[reader].submit(partial(self._read, load, chunk, self._buffers[reader]))

    def stop(self, timeout: float) -> bool:
        """End the threads; returns whether that took no longer than ``timeout`` seconds in all."""
        deadline = self._clock() + timeout
        finished = True
        for worker in (self._finder, *self._readers, self._preparer):
            finished &= worker.stop(max(0.0, deadline - self._clock()))
        return finished

    def _prepare_some(self, start: int) -> None:
        """Make the pool's memory ready from a block on: what is loaded first after a restart should not wait for it."""
        stop = min(start + _PREPARED_BLOCKS, self._num_prepared)
        if start < stop:
            self._preparer.submit(partial(self._rows.prepare, np.arange(start, stop, dtype=np.int32)))
            self._preparer.submit(partial(self._prepare_some, stop))

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

    def _read(self, load: Load, chunk: Span, buffer: BlockBytes) -> None:
        began = self._clock()
        load.begin_chunk(chunk, began)
        buffer = buffer[: chunk.stop - chunk.start]
        found = 0
        try:
            if not load.ended:
                found = self._stack.read(chunk, load.keys, buffer)
        finally:
            if load.write(self._rows, chunk, buffer[:found], began, self._clock):
                self.progress.set()
                self._stack.mark_used(load.keys[: load.first + load.num_loaded])


def _chunks(spans: Sequence[Span]) -> Iterator[Span]:
    for span in spans:
        for start in range(span.start, span.stop, _CHUNK_BLOCKS):
            yield Span(span.tier, start, min(start + _CHUNK_BLOCKS, span.stop))
