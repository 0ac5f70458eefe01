"""Finds and reads prefixes in tiers in the background."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from radixkv.threads import Worker
from radixkv.tiers.moves.load import Load, LookUp
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.prefix_search import find_prefix
from radixkv.tiers.moves.writer import BlockWriter, PrefixBlocks
from radixkv.tiers.stack import Span, TierStack
from radixkv.tiers.tier import BlockBytes

# Blocks read and written at a time: few enough to stay in the processor's caches in between, enough for a disk to be fast.
_CHUNK_BLOCKS = 8
# Threads that take chunks: while one is at a disk, the other copies.
_NUM_READERS = 2
# At most this much of a pool's memory is prepared before anything is loaded, this many blocks at a time.
_MAX_PREPARED_BYTES = 1 << 30
_PREPARED_BLOCKS = 64
# Preparing memory holds up steps that also take memory: for each second of it, the thread sleeps for this many.
_PREPARING_PAUSE = 4


class BlockLoader:
    """Looks prefixes up and loads them, in separate threads.

    A look-up never waits for a read, and a read never waits for memory to be prepared.

    Args:
        stack: where blocks are read.
        writer: puts blocks there.
        keys: makes their keys.
        rows: of the pool into which they are written.
        make_buffer: an array of ``(blocks, bytes of a block)``; for a GPU in pinned memory.
        num_stored: blocks that tiers hold already, as far as is known: memory for this many is prepared from the start.
        clock: seconds.

    Attributes:
        progress: set when a look-up or a load is done; the waiting thread clears it.
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
        self._buffers: SimpleQueue[BlockBytes] = SimpleQueue()  # not in use by a reader
        for _ in range(_NUM_READERS):
            self._buffers.put(make_buffer(_CHUNK_BLOCKS, rows.nbytes))
        self._clock = clock
        self._finder = Worker("radixkv-tier-finder")
        self._readers = Worker("radixkv-tier-reader", _NUM_READERS)
        self._preparer = Worker("radixkv-tier-memory")
        self._early_preparer = Worker("radixkv-tier-early-memory")
        self._num_prepared = min(num_stored, rows.num_blocks, _MAX_PREPARED_BYTES // rows.nbytes)
        self._early_preparer.submit(partial(self._prepare, 0))

    def look_up(self, look_up: LookUp) -> None:
        """Begin to look for a prefix."""
        self._finder.submit(partial(self._find, look_up, wait=True))

    def load(self, load: Load) -> None:
        """Begin to load; nothing else may use the load's blocks until it is done."""
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

    def _prepare(self, start: int) -> None:
        """Prepare the pool's memory from a block on, so that the first loads after a restart do not wait for it."""
        stop = min(start + _PREPARED_BLOCKS, self._num_prepared)
        if start < stop:
            began = time.monotonic()
            self._rows.prepare(np.arange(start, stop, dtype=np.int32))
            time.sleep(_PREPARING_PAUSE * (time.monotonic() - began))
            self._early_preparer.submit(partial(self._prepare, stop))  # a job of its own, so that `stop` ends it

    def _find(self, look_up: LookUp, *, wait: bool) -> None:
        """Look for a prefix. If missing blocks are on their way down, look again, once, when they have been written."""
        spans: list[Span] = []
        look_up.waits_for_writer = False
        try:
            # Before the tiers are searched: a block that is written in between is then in both, not in neither.
            queued = self._writer.queued() if wait else []
            look_up.keys, spans = find_prefix(self._stack, self._keys, look_up.namespace, look_up.tokens, look_up.start)
            missing = look_up.first_missing(spans)
            # The queue is written in order: once its last match is written, all are.
            last = next(
                (
                    blocks
                    for blocks in reversed(queued)
                    if any(self._has_some(p, look_up, missing) for p in blocks.parts)
                ),
                None,
            )
            if last is not None:
                look_up.waits_for_writer = True
                last.done.add_done_callback(lambda _: self._finder.submit(partial(self._find, look_up, wait=False)))
                return
        except BaseException:
            self._answer(look_up, [])
            raise
        self._answer(look_up, spans)

    def _has_some(self, part: PrefixBlocks, look_up: LookUp, missing: int) -> bool:
        """Whether some of the prefix's blocks from ``missing`` on are in the part."""
        index = max(missing, part.start)
        stop = (index + 1) * self._keys.block_bytes
        return stop <= len(look_up.tokens) and part.has(look_up.namespace, look_up.tokens[:stop], index)

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
