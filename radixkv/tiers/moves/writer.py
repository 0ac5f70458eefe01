"""Writes blocks into tiers in the background, out of a bounded queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from radixkv.threads import Worker
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.stack import TierStack
from radixkv.tiers.tier import BlockBytes

# A tier that takes longer than this for one batch is not waited for again until it has caught up.
_FLUSH_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class PrefixBlocks:
    """Consecutive blocks of one prefix; the last may be partly filled if there are whole ones before it.

    Attributes:
        tokens: of the prefix up to the end of the last block or further, encoded.
        start, stop: the blocks' range of indices in the prefix.
    """

    namespace: str
    tokens: bytes
    start: int
    stop: int

    @property
    def num_blocks(self) -> int:
        return self.stop - self.start

    def has(self, namespace: str, prefix: bytes, index: int) -> bool:
        """Whether block ``index`` of a prefix, whose tokens up to that block's end are ``prefix``, is one of these."""
        return self.start <= index < self.stop and self.namespace == namespace and self.tokens.startswith(prefix)


@dataclass(eq=False, slots=True)
class QueuedBlocks:
    """Blocks that are written together.

    Attributes:
        parts: the blocks, by prefix.
        num_clears: for each part, how often its namespace had been cleared when it was queued; see `TierStack.write`.
        fetch: returns the blocks' bytes.
        release: called when nothing uses these bytes any more.
        done: has its result when the blocks are written or lost.
    """

    parts: Sequence[PrefixBlocks]
    num_clears: Sequence[int]
    fetch: Callable[[], BlockBytes]
    release: Callable[[], None]
    done: Future[None] = field(default_factory=Future)


class BlockWriter:
    """Moves blocks from the pool into the tier stack; the counterpart of `BlockLoader`.

    It accepts blocks until its queue is full. A process that is killed loses no more than that queue.

    Args:
        stack: where blocks are put.
        keys: makes their keys.
        block_nbytes: of a block.
        max_queued_bytes: of blocks that wait to be written.

    Attributes:
        num_dropped: blocks for which there was no room in the queue.
    """

    def __init__(self, stack: TierStack, keys: PrefixKeys, block_nbytes: int, max_queued_bytes: int) -> None:
        self.num_dropped = 0
        self._stack = stack
        self._keys = keys
        self._max_blocks = max(1, max_queued_bytes // block_nbytes)
        self._num_queued = 0
        self._queue: dict[QueuedBlocks, None] = {}
        self._changed = threading.Condition()
        self._worker = Worker("radixkv-tier-writer")

    def reserve(self, num_blocks: int, timeout: float = 0.0, share: float = 1.0) -> int:
        """Take room in the queue for `put`.

        Args:
            num_blocks: to be put.
            timeout: seconds to wait until there is room for any.
            share: of the queue that may be full.

        Returns:
            For how many of the blocks there is room.
        """
        with self._changed:
            most = max(1, int(share * self._max_blocks))
            self._changed.wait_for(lambda: self._num_queued < most, timeout)
            count = min(num_blocks, max(0, most - self._num_queued))
            self._num_queued += count
            return count

    def reserve_or_drop(self, num_blocks: int) -> int:
        """`reserve` for blocks that cannot wait; those without room are counted as dropped."""
        count = self.reserve(num_blocks)
        self.num_dropped += num_blocks - count
        return count

    def give_back(self, num_blocks: int) -> None:
        """Give back room that was reserved and is not used."""
        with self._changed:
            self._num_queued -= num_blocks
            self._changed.notify_all()

    def drop(self, num_blocks: int) -> None:
        """`give_back` the room of blocks that are not put after all; they are counted as dropped."""
        self.give_back(num_blocks)
        self.num_dropped += num_blocks

    def put(
        self, parts: list[PrefixBlocks], fetch: Callable[[], BlockBytes], release: Callable[[], None] = lambda: None
    ) -> None:
        """Write blocks for which room was reserved.

        Args:
            parts: what the rows are, part by part.
            fetch: called by the thread that writes, for the rows.
            release: called by it when nothing uses the rows any more; never, if a tier hangs that has borrowed them.
        """
        num_clears = [self._stack.num_clears(self._keys.group(part.namespace)) for part in parts]
        queued = QueuedBlocks(parts, num_clears, fetch, release)
        with self._changed:
            self._queue[queued] = None
        self._worker.submit(partial(self._write, queued))

    def mark_used(self, part: PrefixBlocks) -> None:
        """Mark these blocks as used in the tiers, when all that is queued is written; see `RecencyOrdered`."""
        self._worker.submit(partial(self._mark_used, part))

    def queued(self) -> list[QueuedBlocks]:
        """The blocks that are not written yet: a tier that lacks one of them may have it soon."""
        with self._changed:
            return list(self._queue)

    def flush(self, timeout: float) -> bool:
        """Wait until nothing is queued; False if ``timeout`` seconds were not enough."""
        with self._changed:
            return self._changed.wait_for(lambda: self._num_queued == 0, timeout)

    @property
    def num_queued(self) -> int:
        """Blocks that are not written yet."""
        return self._num_queued

    def stop(self, timeout: float) -> bool:
        """Write what is queued; returns whether that took no longer than ``timeout`` seconds."""
        return self._worker.stop(timeout)

    def _write(self, queued: QueuedBlocks) -> None:
        try:
            rows = queued.fetch()
            start = 0
            written = []
            for part, num_clears in zip(queued.parts, queued.num_clears, strict=True):
                keys = self._keys_of(part)
                self._stack.write(keys, rows[start : start + len(keys)], num_clears)
                start += len(keys)
                written.append(keys)
            # Tiers drop what exceeds their own queues. Waiting for them keeps the excess in this queue, which counts drops.
            if self._stack.flush(_FLUSH_SECONDS):
                queued.release()
            for keys in written:  # tiers write several batches, one after the other
                self._stack.mark_used(keys)
        finally:
            with self._changed:
                del self._queue[queued]
                self._num_queued -= sum(part.num_blocks for part in queued.parts)
                self._changed.notify_all()
            queued.done.set_result(None)

    def _keys_of(self, part: PrefixBlocks) -> list[BlockKey]:
        keys = self._keys.of(part.namespace, part.tokens)
        if len(keys) < part.stop:
            keys.append(self._keys.partly_filled(part.namespace, part.tokens, len(keys))[0])
        return keys[part.start : part.stop]

    def _mark_used(self, part: PrefixBlocks) -> None:
        self._stack.mark_used(self._keys_of(part))
