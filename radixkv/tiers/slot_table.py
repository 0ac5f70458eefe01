"""Which slot holds which block of a store that this process writes: in memory, ordered by last use."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from radixkv.tiers.block_key import BlockKey, mark_ancestors_used
from radixkv.tiers.record import Verdict
from radixkv.tiers.slot_index import IndexedBlock
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
        self._entries: OrderedDict[bytes, IndexedBlock] = OrderedDict()  # by digest, least recently used first
        self._used: dict[int, float] = {}  # when slots were read, to be written with the next batch
        self._freed: list[int] = []  # slots of blocks that were cleared, or proved wrong, until `take_freed`

    def __len__(self) -> int:
        return len(self._entries)

    def fill(self, entries: OrderedDict[bytes, IndexedBlock]) -> None:
        """Replace all entries by those of an index."""
        with self._lock:
            before, self._entries = self._entries, entries
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

    def mark_used(self, prefix: Sequence[BlockKey]) -> int:
        """The blocks were used now, see `radixkv.tiers.tier.RecencyOrdered`.

        Those before them stay longer, too; after a restart only if they are marked themselves. A long prefix is put in many
        parts, and to write down at each when all before it were used would take longer than writing the part.

        Returns:
            How many of those before them are there.
        """
        now = time.time()
        with self._lock:
            for rank, key in enumerate(reversed(prefix)):
                entry = self._entries.get(key.digest)
                if entry is not None:
                    self._entries.move_to_end(key.digest)
                    self._used[entry.slot] = now + rank * _SECONDS_APART
            return mark_ancestors_used(self._entries, prefix)

    def add(self, keys: Sequence[BlockKey], blocks: Sequence[IndexedBlock]) -> None:
        """The blocks are in their slots now."""
        with self._lock:
            self._entries.update((block.digest, block) for block in blocks)
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
                    del self._entries[key.digest]
                    self._freed.append(entry.slot)
                    forgotten.append(key.digest)
                    corrupt += verdict is Verdict.CORRUPT
            if self.observer is not None:
                # It may not know yet of blocks from an earlier process; it must not be notified of those evicted meanwhile.
                self.observer.on_stored([key for key, _ in found[:count] if key.digest in self._entries])
                self.observer.on_removed(forgotten)
        return corrupt

    def evict(self, count: int, successors: Sequence[BlockKey]) -> list[int]:
        """Forget the ``count`` least recently used blocks, or as many as there are, and return their slots.

        Args:
            count: how many to forget.
            successors: what takes their place. Nothing before one of these is forgotten: it could not be found then.
        """
        kept: set[bytes] = set()
        for successor in successors if count else ():  # a long prefix takes a millisecond
            for key in successor.ancestors():
                if key.digest in kept:
                    break  # and so are those before it
                kept.add(key.digest)
        with self._lock:
            doomed = [*islice((digest for digest in self._entries if digest not in kept), count)]
            evicted = [self._entries.pop(digest) for digest in doomed]
            self._notify_removed(evicted)
        return [entry.slot for entry in evicted]

    def clear(self, namespace: bytes | None) -> None:
        """Forget one namespace, or everything."""
        with self._lock:
            digests = [digest for digest, entry in self._entries.items() if namespace in (None, entry.namespace)]
            cleared = [self._entries.pop(digest) for digest in digests]
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

    def _notify_removed(self, entries: Sequence[IndexedBlock]) -> None:
        if self.observer is not None:
            self.observer.on_removed([entry.digest for entry in entries])
