"""Blocks on their way to a medium: a bounded queue, and the thread that empties it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from radixkv.threads import WorkerThread
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.tier import BlockBytes

_log = logging.getLogger(__name__)

BATCH_BLOCKS = 32
# Of jobs that may be dropped, so many wait at most.
_MAX_DROPPABLE = 1024


@dataclass(slots=True, eq=False)
class PendingBlock:
    """A block that waits to be written.

    Attributes:
        key: the block's.
        block: its bytes.
        lent: whether the bytes are in the caller's memory, not in the queue's.
        prefix: all keys of a call of `MediumQueue.put`; only on the last block that the call queued.
        cancelled: whether the block was cleared meanwhile, and must not be found again.
    """

    key: BlockKey
    block: BlockBytes
    lent: bool
    prefix: Sequence[BlockKey] = ()
    cancelled: bool = False


class MediumQueue:
    """One tier's blocks that wait for its medium, and the thread that writes them.

    The thread writes in batches. Blocks wait in the queue's own memory or, if they are lent, in the caller's.

    Args:
        name: of the thread.
        block_bytes: bytes per block.
        queue_bytes: of blocks that may wait; any beyond that are dropped.
        write: called by the thread with some blocks. It does not raise if the medium fails. A MemoryError drops these blocks;
            any other error is a bug, which is logged, and all blocks are dropped from then on. Jobs are still called.
    """

    def __init__(
        self, name: str, block_bytes: int, queue_bytes: int, write: Callable[[list[PendingBlock]], None]
    ) -> None:
        self._write = write
        # Rows that were never used cost no memory, so the most recently used ones are taken first.
        self._rows = np.empty((max(1, queue_bytes // block_bytes), block_bytes), dtype=np.uint8)
        self._num_rows_used = self._num_waiting = 0
        self._free: list[BlockBytes] = []
        self._pending: dict[bytes, PendingBlock] = {}
        self._queue: deque[PendingBlock | Callable[[], None]] = deque()
        self._droppable: deque[Callable[[], None]] = deque()  # for each, `_call_oldest_droppable` is in the queue
        self._num_put = self._num_done = 0
        self._closing = self._ended = self._broken = False
        self._changed = threading.Condition()
        self._thread = WorkerThread(self._run, name)
        self._thread.start()

    def put(self, keys: Sequence[BlockKey], blocks: BlockBytes, rows: Sequence[int], *, lent: bool) -> int:
        """Queue the given rows of ``blocks``, except for those that wait already.

        Args:
            keys: one per row of ``blocks``.
            blocks: are copied, unless they are lent.
            rows: of ``blocks``.
            lent: the blocks do not change until `flush` has returned True, or nothing refers to them any more.

        Returns:
            How many were dropped. It is the last ones, since a prefix is of use only up to its first gap.
        """
        taken: list[tuple[int, PendingBlock]] = []
        dropped = 0
        with self._changed:
            for row in rows:
                key = keys[row]
                if key.digest in self._pending:
                    continue
                if self._closing or self._broken or self._num_waiting == len(self._rows):
                    dropped += 1
                    continue
                pending = PendingBlock(key, blocks[row] if lent else self._memory(), lent)
                self._pending[key.digest] = pending
                self._num_waiting += 1
                taken.append((row, pending))
            if taken:
                taken[-1][1].prefix = tuple(keys)
        if not lent:
            for row, pending in taken:
                pending.block[:] = blocks[row]
        with self._changed:
            if self._ended:  # meanwhile
                return dropped + len(taken)
            self._queue.extend(pending for _, pending in taken)
            self._num_put += len(taken)
            self._changed.notify_all()
        return dropped

    def cancel(self, namespace: bytes | None, job: Callable[[], None]) -> None:
        """Cancel the waiting blocks of one namespace, or all; the thread calls ``job`` before it writes what is put later.

        See `PendingBlock.cancelled`.
        """
        with self._changed:
            for digest, pending in list(self._pending.items()):
                if namespace is None or pending.key.namespace == namespace:
                    pending.cancelled = True
                    del self._pending[digest]
            self.call(job)

    def call(self, job: Callable[[], None]) -> None:
        """Have the thread call ``job`` between two batches; it is not called once the thread has ended."""
        with self._changed:
            if not self._ended:
                self._queue.append(job)
                self._num_put += 1
                self._changed.notify_all()

    def call_droppable(self, job: Callable[[], None]) -> None:
        """`call` a job. Where too many of this kind wait, as while the medium hangs, the oldest is dropped.

        Those behind it then move up: they may be called before what was queued before them.
        """
        with self._changed:
            if self._ended:
                return
            if len(self._droppable) < _MAX_DROPPABLE:
                self.call(self._call_oldest_droppable)
            else:
                self._droppable.popleft()
            self._droppable.append(job)

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all that is queued now is done; False if ``timeout`` seconds were not enough."""
        with self._changed:
            target = self._num_put
            return self._changed.wait_for(lambda: self._num_done >= target, timeout)

    def close(self) -> None:
        """Write what is queued, and end the thread."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()

    def _memory(self) -> BlockBytes:
        if self._free:
            return self._free.pop()
        row: BlockBytes = self._rows[self._num_rows_used]
        self._num_rows_used += 1
        return row

    def _call_oldest_droppable(self) -> None:
        with self._changed:
            job = self._droppable.popleft()
        job()

    def _next_work(self) -> list[PendingBlock | Callable[[], None]]:
        """One job, or the blocks before the next job, as many as are written together; nothing: it was closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._closing)
            if not self._queue:
                self._ended = True
                return []
            work = [self._queue.popleft()]
            if isinstance(work[0], PendingBlock):
                while self._queue and isinstance(self._queue[0], PendingBlock) and len(work) < BATCH_BLOCKS:
                    work.append(self._queue.popleft())
            return work

    def _run(self) -> None:
        while work := self._next_work():
            blocks = [item for item in work if isinstance(item, PendingBlock)]
            try:
                if blocks and not self._broken:
                    self._write(blocks)
                for item in work:
                    if not isinstance(item, PendingBlock):
                        item()
            except MemoryError:
                _log.warning("%s: out of memory; %d blocks are not written", self._thread.name, len(blocks))
            except Exception:
                _log.exception("Writing blocks failed; none are written any more")
                self._broken = True
            finally:
                with self._changed:
                    for pending in blocks:
                        if self._pending.get(pending.key.digest) is pending:
                            del self._pending[pending.key.digest]
                        if not pending.lent:
                            self._free.append(pending.block)
                    self._num_waiting -= len(blocks)
                    self._num_done += len(work)
                    self._changed.notify_all()
