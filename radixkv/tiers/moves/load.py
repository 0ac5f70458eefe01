"""The look-up of a prefix in tiers, and the load of a prefix from them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.stack import Span
from radixkv.tiers.tier import BlockBytes


@dataclass(eq=False, slots=True)
class LookUp:
    """A search for a prefix in tiers, and its result.

    Attributes:
        start: the first block that was asked for.
        keys: of the prefix's blocks, see `radixkv.tiers.moves.prefix_search.find_prefix`; set with ``spans``.
        spans: of the blocks from ``start`` on; None while they are looked for.
        waits_for_writer: whether the search pauses until blocks on their way down are written.
        done: set when the spans are known.
    """

    namespace: str
    tokens: bytes
    start: int
    keys: list[BlockKey] = field(default_factory=list)
    spans: list[Span] | None = None
    waits_for_writer: bool = False
    done: threading.Event = field(default_factory=threading.Event)

    def tokens_until(self, stop: int) -> bytes:
        """The encoded tokens of the first ``stop`` blocks of `keys`, at least one."""
        return self.tokens[: (stop - 1) * len(self.keys[0].tokens) + len(self.keys[stop - 1].tokens)]

    def first_missing(self, spans: Sequence[Span]) -> int:
        """The index of the first block that is missing or only partly filled, if tiers have no more than ``spans``."""
        if not spans:
            return self.start
        stop = spans[-1].stop
        return stop if self.keys[stop - 1].is_whole else stop - 1


@dataclass(eq=False, slots=True)
class Load:
    """Blocks of one prefix on their way into the pool.

    Attributes:
        keys: of the prefix's blocks.
        spans: where the blocks are read from.
        first: the index of the first one.
        block_ids: where they are written in the pool, int32.
        fence: see `PoolRows.write`.
        num_loaded: blocks that are in the pool.
        read: for each chunk that was loaded: its tier, blocks and seconds.
        cancelled: whether no further chunk may be written.
        done: set when nothing more of the load will be written.
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
    _changed: threading.Condition = field(default_factory=threading.Condition)  # guards what follows
    _num_wanted: int = 0  # blocks before the first one that is missing
    _num_writing: int = 0  # chunks that are being written
    _chunks: dict[int, _Chunk] = field(default_factory=dict)  # that were begun, by their first block
    _num_tried: int = 0  # blocks that were written or are lost, with all before them
    _tried_at: float = 0.0  # when the last of them was

    def __post_init__(self) -> None:
        self._num_wanted = len(self.block_ids)

    def begin_chunk(self, chunk: Span, began: float) -> bool:
        """Note that reading a chunk begins; False: it need not be read."""
        start = chunk.start - self.first
        self._chunks[start] = _Chunk(chunk.tier, chunk.stop - self.first, began)
        return self._wants(start)

    def in_vain(self, now: float) -> tuple[int, float] | None:
        """The tier that the next blocks are read from, and for how long so far; None: earlier loads are still being read."""
        chunk = self._chunks.get(self._num_tried)
        return None if chunk is None else (chunk.tier, now - max(chunk.began, self._tried_at))

    def cancel(self) -> None:
        """Write nothing more from now on. Waits for chunks that are being written, which does not involve a medium."""
        with self._changed:
            self.cancelled = True
            self._changed.wait_for(lambda: not self._num_writing)

    def try_cancel(self) -> bool:
        """Write no further chunk; False: one is still being written, until `done` is set or a later call returns True."""
        with self._changed:
            self.cancelled = True
            return not self._num_writing

    def write(self, rows: PoolRows, chunk: Span, blocks: BlockBytes, clock: Callable[[], float]) -> bool:
        """Write what was read of a chunk, unless the load has ended. Several threads write chunks at the same time.

        Args:
            rows: of the pool.
            chunk: one that was begun.
            blocks: its leading blocks that were there; if any is missing, the load ends with them.
            clock: seconds.

        Returns:
            Whether the load is done.
        """
        start = chunk.start - self.first
        begun = self._chunks[start]
        with self._changed:
            begun.is_wanted = self._wants(start)
            self._num_writing += begun.is_wanted
        try:
            if begun.is_wanted and len(blocks):
                rows.write(self.block_ids[start : start + len(blocks)], blocks, self.fence)
                begun.num_written = len(blocks)
        finally:
            with self._changed:
                self._num_writing -= begun.is_wanted
                if begun.num_written < begun.stop - start:
                    self._num_wanted = min(self._num_wanted, start + begun.num_written)
                begun.ended = clock()
                self._count()
                self._changed.notify_all()
                is_done = self._num_tried == len(self.block_ids)
                if is_done:
                    self.done.set()
        return is_done

    def _wants(self, start: int) -> bool:
        return not self.cancelled and start < self._num_wanted

    def _count(self) -> None:
        """Count chunks that have finished along with all before them. Time in which two were read at once counts once."""
        while (chunk := self._chunks.get(self._num_tried)) is not None and chunk.ended is not None:
            if chunk.is_wanted and self.num_loaded == self._num_tried:  # else blocks before these are missing
                self.num_loaded += chunk.num_written
                seconds = max(0.0, chunk.ended - max(chunk.began, self._tried_at))
                self.read.append((chunk.tier, chunk.num_written, seconds))
            self._num_tried = chunk.stop
            self._tried_at = max(self._tried_at, chunk.ended)


@dataclass(slots=True)
class _Chunk:
    """A part of a load that one thread reads and writes: from which tier, until which block, and from when until when."""

    tier: int
    stop: int
    began: float
    ended: float | None = None
    is_wanted: bool = False
    num_written: int = 0
