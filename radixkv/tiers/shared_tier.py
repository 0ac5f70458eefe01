"""Blocks that several machines share: a tier over any store of named blobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from radixkv.cache.arguments import check_count
from radixkv.tiers.backoff import Backoff, warn_of_uncleared
from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.medium_queue import MediumQueue, PendingBlock
from radixkv.tiers.record import RecordCodec, Verdict
from radixkv.tiers.stats import StoreCounters, StoreStats
from radixkv.tiers.tier import BlockBytes


class PartlyWrittenError(OSError):
    """A store failed after it had looked which of the blobs were missing, and had perhaps written some of them.

    Args:
        reason: of the failure.
        num_written: how many it wrote.
        num_lost: how many it did not write that are not there.

    Attributes:
        num_written, num_lost: see above.
    """

    def __init__(self, reason: str, num_written: int, num_lost: int) -> None:
        super().__init__(reason)
        self.num_written = num_written
        self.num_lost = num_lost


class BlobStore(Protocol):
    """Bytes by name. A name is a path ``format/namespace/block-before``: of a block and, unless it is a prefix's first, of
    that before it, without which it is of no use.

    Calls may come from several threads at a time. Failures of the medium are raised as an OSError.

    Attributes:
        description: of the store, for people, without secrets.
    """

    description: str

    def count_present(self, names: Sequence[str]) -> int:
        """How many leading names exist."""

    def first_present(self, names: Sequence[str]) -> int | None:
        """The index of the first name that exists; None: none does."""

    def read(self, names: Sequence[str]) -> Sequence[bytes | None]:
        """The blobs, None where there is none; the result may end after the first None."""

    def write(self, blobs: Mapping[str, bytes]) -> int:
        """Write those of the blobs that are not there, each whole or not at all; returns how many it wrote.

        Raises:
            OSError: none was written; a `PartlyWrittenError` says how many were.
        """

    def mark_used(self, names: Sequence[str]) -> None:
        """Blobs of one prefix were used now, those that are there: the last of them are to make room before the first."""

    def delete(self, names: Sequence[str]) -> None:
        """Remove blobs, which need not be there."""

    def clear(self, path: str) -> None:
        """Remove all blobs whose names begin with ``path`` and a ``/``."""

    def close(self) -> None:
        """Release what is held open."""


class SharedTier:
    """A tier in a store that several processes write to, on this machine or others.

    `contains_prefix` and `get_many` call the store, so a thread that must not wait should not call them. A thread of the tier
    writes and clears. A store that fails is left alone for a while, and nothing is found in it; one that only refuses writes
    is still read. Keys need their `BlockKey.parent`, unless they are the first: blocks are named by both.

    Args:
        store: of blobs.
        block_format: of the blocks.
        queue_bytes: of blocks that may wait to be written; any beyond that are dropped.
        key: encrypts the blocks, 32 bytes; None: they are stored as they are.
        clock: seconds, for statistics and for when to try a failed store again.

    Attributes:
        medium: "shared".

    Raises:
        ImportError: a key is given, and cryptography is not installed.
        ValueError: the key has another length, or ``queue_bytes`` is not a number of bytes.
    """

    medium = "shared"

    def __init__(
        self,
        store: BlobStore,
        block_format: BlockFormat,
        *,
        queue_bytes: int = 256 << 20,
        key: bytes | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        check_count("queue_bytes", queue_bytes, 1)
        self._store = store
        self._codec = RecordCodec(block_format, key)
        self._clock = clock
        self._counters = StoreCounters()
        self._reads = Backoff(f"reading {store.description}", clock)
        self._writes = Backoff(f"writing {store.description}", clock)
        self._unreadable = False  # whether reading blocks failed last: that the store finds some proves nothing then
        # Paths still to be cleared, and the number of the latest call that did so: until the store has cleared a path after
        # that call, nothing below it is read. Any thread reads this; each change replaces it, under the lock.
        self._uncleared: dict[str, int] = {}
        self._num_clears = 0
        self._clearing = threading.Lock()
        self._will_clear_again = False  # whether a job for it is queued: the writer's thread may hang
        self._refused_clear = False  # whether the store did, since it worked last; used by the thread that clears
        self._closed = False
        self._writer = MediumQueue("shared-tier", block_format.block_bytes, queue_bytes, self._write)

    @property
    def stats(self) -> StoreStats:
        return self._counters.read()

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        return self._look_up(self._store.count_present, keys) or 0

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        """See `radixkv.tiers.tier.PartlyFilledKeeper`."""
        return self._look_up(self._store.first_present, keys)

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        self._codec.check_rows(keys, out)
        begin = self._clock()
        count = 0
        if keys and self._readable(keys[0]):
            try:
                count = self._get(keys, out)
                self._unreadable = False
                self._reads.worked()
            except OSError as error:
                self._unreadable = True
                self._failed(self._reads, error)
        self._counters.add_read(count, len(keys), self._codec.format.block_bytes, self._clock() - begin)
        return count

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        self._put(keys, blocks, lent=False)

    def borrow_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """See `radixkv.tiers.tier.Borrower`."""
        self._put(keys, blocks, lent=True)

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """See `radixkv.tiers.tier.RecencyOrdered`; the tier's thread passes it to the store."""
        if prefix:
            names = [self._name(key) for key in prefix]
            self._writer.call_droppable(partial(self._if_ready, partial(self._store.mark_used, names)))

    def clear(self, namespace: bytes | None = None) -> None:
        """Forget one namespace, or everything of this format.

        From now on, nothing of it is found here, nor by others once the store has cleared it. A store that is gone is cleared
        when it is back and this process uses it again or closes the tier.
        """
        if self._closed:
            return
        path = self._codec.name + ("" if namespace is None else f"/{namespace.hex()}")
        self._note_uncleared(path)
        self._writer.cancel(namespace, partial(self._clear, path))

    def flush(self, timeout: float | None = None) -> bool:
        return self._writer.flush(timeout)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._writer.close()
            self._attempt(self._clear_store)  # even if it was left alone
            if self._uncleared:
                warn_of_uncleared(self._store.description)
            self._store.close()

    def _name(self, key: BlockKey) -> str:
        before = "" if key.parent is None else f"-{key.parent.digest.hex()}"
        return f"{self._codec.name}/{key.namespace.hex()}/{key.digest.hex()}{before}"

    def _readable(self, key: BlockKey) -> bool:
        """Whether a key's namespace can be read now; all keys of a call have the same."""
        if self._closed or not self._reads.ready:
            return False
        uncleared = self._uncleared
        if not uncleared:
            return True
        self._clear_again()
        return uncleared.keys().isdisjoint((self._codec.name, f"{self._codec.name}/{key.namespace.hex()}"))

    def _clear_again(self) -> None:
        """Have the writer's thread clear what the store could not clear, once it may be tried again."""
        with self._clearing:
            if self._will_clear_again or not self._writes.ready:
                return
            self._will_clear_again = True
        self._writer.call(self._clear_uncleared)

    def _look_up(self, method: Callable[[Sequence[str]], int | None], keys: Sequence[BlockKey]) -> int | None:
        """The result of a method of the store for some names; None: nothing can be read now."""
        if not keys or not self._readable(keys[0]):
            return None
        try:
            found = method([self._name(key) for key in keys])
        except OSError as error:
            self._failed(self._reads, error)
            return None
        if not self._unreadable:
            self._reads.worked()
        return found

    def _get(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        names = [self._name(key) for key in keys]
        size = self._codec.header_bytes
        for row, (key, blob) in enumerate(zip(keys, self._store.read(names), strict=False)):
            if blob is None:
                return row
            verdict = Verdict.CORRUPT
            if len(blob) == size + self._codec.body_bytes:
                verdict = self._codec.decode(key, blob[:size], memoryview(blob)[size:], out[row].data)
            if verdict is not Verdict.RIGHT:
                self._counters.add(corrupt_blocks=1)
                self._writer.call_droppable(partial(self._if_ready, partial(self._store.delete, [names[row]])))
                return row
        return len(keys)

    def _put(self, keys: Sequence[BlockKey], blocks: BlockBytes, *, lent: bool) -> None:
        self._codec.check_rows(keys, blocks)
        self._counters.add(dropped_blocks=self._writer.put(keys, blocks, range(len(keys)), lent=lent))

    # In the writer's thread

    def _write(self, batch: list[PendingBlock]) -> None:
        begin = self._clock()
        dropped, written = sum(not pending.cancelled for pending in batch), 0
        try:
            if self._writes.ready:
                self._clear_store()
                blobs = {}
                for pending in batch:
                    if pending.cancelled:
                        continue
                    header, body = self._codec.encode(pending.key, pending.block.data)
                    blobs[self._name(pending.key)] = b"".join((header, body))
                written = self._store.write(blobs)
                dropped = 0
                if written:  # else nothing is proved: even a full store accepts what it has already
                    self._writes.worked()
        except PartlyWrittenError as error:
            dropped, written = error.num_lost, error.num_written
            self._failed(self._writes, error)
        except OSError as error:
            self._failed(self._writes, error)
        finally:
            self._counters.add(
                written_blocks=written,
                written_bytes=written * self._codec.format.block_bytes,
                dropped_blocks=dropped,
                write_seconds=self._clock() - begin,
            )

    def _clear(self, path: str) -> None:
        # Once more: a batch that was being written when the path was cleared may have put something back.
        self._note_uncleared(path)
        self._clear_uncleared()

    def _clear_uncleared(self) -> None:
        self._will_clear_again = False
        self._if_ready(self._clear_store)

    def _clear_store(self) -> None:
        for path, clear in self._uncleared.items():
            try:
                self._store.clear(path)
            except OSError:
                self._refused_clear = True
                raise
            if self._refused_clear:  # else nothing is proved: a full store clears, too
                self._refused_clear = False
                self._writes.worked()
            with self._clearing:
                if self._uncleared.get(path) == clear:
                    self._uncleared = {other: later for other, later in self._uncleared.items() if other != path}

    def _note_uncleared(self, path: str) -> None:
        with self._clearing:
            self._num_clears += 1
            self._uncleared = self._uncleared | {path: self._num_clears}

    def _if_ready(self, job: Callable[[], None]) -> None:
        """`_attempt`, unless the store was left alone."""
        if self._writes.ready:
            self._attempt(job)

    def _attempt(self, job: Callable[[], None]) -> None:
        """Do what changes the store, which is left alone for a while if that fails."""
        try:
            job()
        except OSError as error:
            self._failed(self._writes, error)

    def _failed(self, backoff: Backoff, error: OSError) -> None:
        self._counters.add(errors=1)
        backoff.failed(error)
