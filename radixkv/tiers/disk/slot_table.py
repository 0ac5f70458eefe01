"""Which slot holds which block of a store that this process writes: in memory, ordered by last use."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from radixkv.tiers.block_key import BlockKey
from radixkv.tiers.disk.slot_index import IndexedBlock
from radixkv.tiers.eviction_order import EvictionOrder
from radixkv.tiers.record import Verdict
from radixkv.tiers.tier_events import TierObserver

# Blocks of a prefix are used at once, but the last of them is to be evicted first, after a restart, too.
_SECONDS_APART = 1e-6


class SlotTable:
    """The blocks of one store. Any thread may call; calls take microseconds.

    Attributes:
        observer: notified of which blocks are there, in the order of the changes; None: there is none.
    """

    def __init__(self) -> None:
        self.observer: TierObserver | None = None
        self._lock = threading.Lock()
        self._entries: dict[bytes, IndexedBlock] = {}  # by digest
        self._order = EvictionOrder()
        self._used: dict[int, float] = {}  # when slots were read, to be written with the next batch
        self._freed: list[int] = []  # slots of blocks that were cleared, or proved wrong, until `take_freed`

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, entries: dict[bytes, IndexedBlock]) -> None:
        """Replace all entries by those of an index, least recently used first."""
        order = EvictionOrder(entries)
        with self._lock:
            before, self._entries, self._order = self._entries, entries, order
            self._used, self._freed = {}, []
            self._notify_removed([entry for digest, entry in before.items() if digest not in entries])

    def missing(self, keys: Sequence[BlockKey]) -> list[int]:
        """The indices of the blocks that are not there."""
        with self._lock:
            return [row for row, key in enumerate(keys) if key.digest not in self._entries]

    def find(self, keys: Sequence[BlockKey]) -> list[tuple[BlockKey, IndexedBlock]]:
        """The leading blocks that are there."""
        found = []
        with self._lock:
            for key in keys:
                entry = self._entries.get(key.digest)
                if entry is None:
                    break
                found.append((key, entry))
        return found

    def mark_used(self, prefix: Sequence[BlockKey]) -> None:
        """The blocks were used now, see `radixkv.tiers.tier.RecencyOrdered`.

        Those before them stay longer, too; after a restart only if they are marked themselves. A long prefix is put in many
        parts, and to write down at each when all before it were used would take longer than writing the part.
        """
        now = time.time()
        with self._lock:
            self._order.use(prefix)
            for rank, key in enumerate(reversed(prefix)):
                entry = self._entries.get(key.digest)
                if entry is not None:
                    self._used[entry.slot] = now + rank * _SECONDS_APART

    def add(self, keys: Sequence[BlockKey], blocks: Sequence[IndexedBlock]) -> None:
        """The blocks are in their slots now."""
        with self._lock:
            self._entries.update((block.digest, block) for block in blocks)
            for key in reversed(keys):
                self._order.add(key)
            if self.observer is not None:
                self.observer.on_stored(keys)

    def note_verdicts(
        self, found: Sequence[tuple[BlockKey, IndexedBlock]], verdicts: Sequence[Verdict | None], count: int
    ) -> int:
        """Forget blocks whose records proved wrong, unless another block took the slot meanwhile.

        Of blocks that could not be read only the first is forgotten: a sector may be bad, or the disk gone for a while.

        Args:
            found: by `find`.
            verdicts: of their records; None: it could not be read.
            count: how many leading ones are right.

        Returns:
            How many were corrupt.
        """
        forgotten: list[bytes] = []
        corrupt = 0
        with self._lock:
            for row, ((key, entry), verdict) in enumerate(zip(found, verdicts, strict=True)):
                wrong = row == count if verdict is None else verdict is not Verdict.RIGHT
                if wrong and self._entries.get(key.digest) is entry:
                    self._pop(key.digest)
                    self._freed.append(entry.slot)
                    forgotten.append(key.digest)
                    corrupt += verdict is Verdict.CORRUPT
            if self.observer is not None:
                # It may not have been notified of blocks from an earlier process; of those evicted meanwhile, it must not be.
                self.observer.on_stored([key for key, _ in found[:count] if key.digest in self._entries])
                self.observer.on_removed(forgotten)
        return corrupt

    def make_room(self, keys: Sequence[BlockKey], num_free: int) -> tuple[list[int], list[int]]:
        """Forget the least recently used blocks, so that others can take their slots.

        Args:
            keys: of the others. Nothing before one that gets a slot is forgotten: it could not be found then.
            num_free: how many of them other slots can take.

        Returns:
            The indices of the keys for which there are slots, and the slots of the forgotten blocks.
        """
        fitting: list[int] = []
        evicted: list[IndexedBlock] = []
        lost: set[bytes] = set()  # what is behind these is of no use
        with self._lock:
            for key in keys:
                self._order.hold(key)
            for row, key in enumerate(keys):
                if len(fitting) >= num_free:
                    is_behind_lost = key.parent is not None and key.parent.digest in lost
                    digest = None if is_behind_lost else self._order.first()
                    if digest is None:
                        lost.add(key.digest)
                        self._order.release(key)
                        continue
                    evicted.append(self._pop(digest))
                fitting.append(row)
            for row in fitting:
                self._order.release(keys[row])
            self._notify_removed(evicted)
        return fitting, [entry.slot for entry in evicted]

    def clear(self, namespace: bytes | None) -> None:
        """Forget one namespace, or everything."""
        with self._lock:
            digests = [digest for digest, entry in self._entries.items() if namespace in (None, entry.namespace)]
            cleared = [self._pop(digest) for digest in digests]
            self._freed += [entry.slot for entry in cleared]
            self._notify_removed(cleared)

    def take_used(self) -> list[tuple[float, int]]:
        """The slots that were used since the last call, and when."""
        with self._lock:
            used, self._used = self._used, {}
        return [(when, slot) for slot, when in used.items()]

    def take_freed(self) -> list[int]:
        """The slots of blocks that were cleared, or whose records proved wrong, since the last call."""
        with self._lock:
            freed, self._freed = self._freed, []
        return freed

    def _pop(self, digest: bytes) -> IndexedBlock:
        """Forget a block that is there."""
        self._order.remove(digest)
        return self._entries.pop(digest)

    def _notify_removed(self, entries: Sequence[IndexedBlock]) -> None:
        if self.observer is not None:
            self.observer.on_removed([entry.digest for entry in entries])
