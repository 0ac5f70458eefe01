"""Host memory as a tier: for the pool of a GPU, which is smaller, and for a CPU's pool where it is limited on purpose."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from radixkv.cache.arguments import check_count
from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.eviction_order import EvictionOrder
from radixkv.tiers.stats import StoreCounters, StoreStats
from radixkv.tiers.tier import BlockBytes, check_blocks
from radixkv.tiers.tier_events import TierObserver


class HostTier:
    """Keeps the most recently used blocks in one array, whose memory the operating system hands out as it is written.

    The array is not pinned, even below a GPU: blocks go through a few pinned ones on their way.

    Args:
        capacity_bytes: of all blocks.
        block_nbytes: of a block.

    Attributes:
        observer: is notified of what is there; None: there is none.

    Raises:
        ValueError: not one block fits.
    """

    medium = "host"

    def __init__(self, capacity_bytes: int, block_nbytes: int) -> None:
        check_count("block_nbytes", block_nbytes, 1)
        check_count("capacity_bytes", capacity_bytes, block_nbytes)
        capacity = capacity_bytes // block_nbytes
        self.observer: TierObserver | None = None
        self._rows: BlockBytes = np.empty((capacity, block_nbytes), dtype=np.uint8)
        self._free = list(range(capacity - 1, -1, -1))
        # By digest: the row, and what it was put under.
        self._entries: dict[bytes, tuple[int, BlockKey]] = {}
        self._order = EvictionOrder()
        # How many threads are copying each row; nothing is written there meanwhile.
        self._readers: Counter[int] = Counter()
        self._lock = threading.Lock()
        self._put_lock = threading.Lock()
        self._counters = StoreCounters()

    @property
    def stats(self) -> StoreStats:
        """See `Tier.stats`."""
        return self._counters.read()

    @property
    def capacity(self) -> int:
        """Blocks at most."""
        return len(self._rows)

    def contains_prefix(self, keys: Sequence[BlockKey]) -> int:
        """See `Tier.contains_prefix`."""
        with self._lock:
            return len(self._leading_rows(keys))

    def first_present(self, keys: Sequence[BlockKey]) -> int | None:
        """See `radixkv.tiers.tier.PartlyFilledKeeper`."""
        with self._lock:
            return next((row for row, key in enumerate(keys) if self._leading_rows([key])), None)

    def get_many(self, keys: Sequence[BlockKey], out: BlockBytes) -> int:
        """See `Tier.get_many`."""
        check_blocks(out, len(keys), self._rows.shape[1])
        began = time.monotonic()
        with self._lock:
            rows = self._leading_rows(keys)
            self._readers.update(rows)
        try:
            # Without the lock: other calls need not wait for the copy.
            np.take(self._rows, rows, axis=0, out=out[: len(rows)], mode="clip")
        finally:
            with self._lock:
                self._readers.subtract(rows)
        self._counters.add_read(len(rows), len(keys), self._rows[0].nbytes, time.monotonic() - began)
        return len(rows)

    def put_many(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        """See `Tier.put_many`."""
        check_blocks(blocks, len(keys), self._rows.shape[1])
        began, evicted, written = time.monotonic(), list[bytes](), list[BlockKey]()
        with self._put_lock:
            with self._lock:
                self._order.use(keys)
                num_there = sum(key.digest in self._entries for key in keys)
                for key in keys:  # none of a prefix makes room for the rest of it
                    self._order.hold(key)
            for key, block in zip(keys, blocks, strict=True):
                with self._lock:
                    if key.digest in self._entries:
                        continue
                    row, lost = self._take_row()
                if row is None:
                    break  # nothing is found behind a block that had no room
                if lost is not None:
                    evicted.append(lost)
                # Without the lock, as no other thread has the row: the pages of fresh memory may take long.
                self._rows[row] = block
                written.append(key)
                with self._lock:
                    self._entries[key.digest] = (row, replace(key, parent=None))
                    self._order.add(key)
            with self._lock:
                for key in keys:
                    self._order.release(key)
        self._counters.add(
            written_blocks=len(written),
            written_bytes=len(written) * self._rows.shape[1],
            write_seconds=time.monotonic() - began,
            dropped_blocks=len(keys) - len(written) - num_there,
            evicted_blocks=len(evicted),
        )
        if self.observer is not None:
            self.observer.on_removed(evicted)
            self.observer.on_stored(written)

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """See `radixkv.tiers.tier.RecencyOrdered`."""
        with self._lock:
            self._order.use(prefix)

    def clear(self, namespace: bytes | None = None) -> None:
        """See `Tier.clear`."""
        cleared = []
        with self._put_lock, self._lock:
            for digest, (_, key) in list(self._entries.items()):
                if namespace in (None, key.namespace):
                    self._free.append(self._pop(digest))
                    cleared.append(digest)
        if self.observer is not None:
            self.observer.on_removed(cleared)

    def flush(self, timeout: float | None = None) -> bool:
        """Nothing waits here."""
        return True

    def close(self) -> None:
        """Forget everything."""
        self.clear()

    def _take_row(self) -> tuple[int | None, bytes | None]:
        """A free row, or that of the block which makes room next, and its digest; no row: all are held, or being read."""
        for place in range(len(self._free) - 1, -1, -1):
            if not self._readers[self._free[place]]:
                return self._free.pop(place), None
        read: list[BlockKey] = []
        while (digest := self._order.first()) is not None and self._readers[self._entries[digest][0]]:
            read.append(self._entries[digest][1])
            self._order.hold(read[-1])
        for key in read:
            self._order.release(key)
        if digest is None:
            return None, None
        return self._pop(digest), digest

    def _pop(self, digest: bytes) -> int:
        """Forget a block that is there; returns its row."""
        self._order.remove(digest)
        return self._entries.pop(digest)[0]

    def _leading_rows(self, keys: Sequence[BlockKey]) -> list[int]:
        rows = []
        for key in keys:
            entry = self._entries.get(key.digest)
            if entry is None or entry[1] != key:
                break
            rows.append(entry[0])
        return rows
