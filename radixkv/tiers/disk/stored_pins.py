"""The pins that are stored on a disk, so that prefixes kept from eviction are kept again after a restart.

A pin is found by the keyed hash of its namespace, whose name is not stored. Its tokens are, encrypted if blocks are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.tiers.block_key import DIGEST_BYTES
from radixkv.tiers.disk.slot_index import IndexedPin, SlotIndex
from radixkv.tiers.record import RecordCodec

# How many of a tenant's pins come back: the most recent ones.
_MAX_OF_TENANT = 64


@dataclass(frozen=True, slots=True)
class StoredPin:
    """A prefix that is to be kept from eviction.

    Attributes:
        name: unique.
        group: what it is cleared by; see `BlockKey.namespace`.
        namespace: digest of the namespace itself.
        tokens: of whole blocks, encoded; not in its repr, since they are a prompt.
        expires_at: in seconds since 1970; None: never.
        by_tenant: whether it is a tenant's, against whose limits it counts; else it is the administrator's.
    """

    name: str
    group: bytes
    namespace: bytes
    tokens: bytes = field(repr=False)
    expires_at: float | None
    by_tenant: bool


class StoredPins:
    """The pins of one store of blocks. Any thread may call.

    Only `commit` raises if the disk fails: a change that cannot be written is written with a later one, or lost.

    Args:
        codec: of the blocks, which encrypts tokens where it encrypts blocks.
        on_change: called when there is something to `commit`.
    """

    def __init__(self, codec: RecordCodec, on_change: Callable[[], None]) -> None:
        self._codec = codec
        self._on_change = on_change
        self._lock = threading.Lock()
        # Pins of an earlier process that are not in force yet, by name.
        self._waiting: dict[str, StoredPin] = {}
        self._in_force: dict[str, StoredPin] = {}
        # What the index lacks: changed pins by name (None: to be forgotten), and groups to be cleared before those changes,
        # each with an object that stands for the last time that it was cleared.
        self._changes: dict[str, StoredPin | None] = {}
        self._cleared: dict[bytes | None, object] = {}

    @property
    def has_unwritten(self) -> bool:
        """Whether anything has changed that `commit` has not written."""
        return bool(self._changes or self._cleared)

    def add(self, pin: StoredPin) -> None:
        """Store a pin that is in force."""
        with self._lock:
            self._changes[pin.name] = self._in_force[pin.name] = pin
        self._on_change()

    def remove(self, name: str) -> bool:
        """Forget a pin; returns whether it was waiting."""
        with self._lock:
            self._changes[name] = None
            self._in_force.pop(name, None)
            was_waiting = self._waiting.pop(name, None) is not None
        self._on_change()
        return was_waiting

    def waiting(self, namespace: bytes | None = None) -> list[StoredPin]:
        """Pins of an earlier process, of one namespace or of all, that are not yet in force and have not expired."""
        if not self._waiting:
            return []
        now = time.time()
        with self._lock:
            pins = list(self._waiting.values())
        for pin in pins:
            if _is_over(pin, now):
                self.remove(pin.name)
        return [pin for pin in pins if namespace in (None, pin.namespace) and not _is_over(pin, now)]

    def comes_into_force(self, name: str) -> None:
        """The pin waits no longer, and stays stored."""
        with self._lock:
            pin = self._waiting.pop(name, None)
            if pin is not None:
                self._in_force[name] = pin

    def clear(self, group: bytes | None) -> None:
        """Forget the pins of one group of namespaces, or all, once this is committed."""
        with self._lock:
            self._cleared[group] = object()
            for pins in (self._waiting, self._in_force, self._changes):
                for name, pin in list(pins.items()):
                    if group is None or (pin is not None and pin.group == group):
                        del pins[name]

    def load(self, rows: Sequence[IndexedPin]) -> None:
        """Take the pins of an index that was opened, as waiting, unless they are known; `commit` writes what it lacks."""
        now = time.time()
        pins = {row.name: self._decoded(row) for row in rows}
        num_of_group: Counter[bytes] = Counter()
        found: dict[str, StoredPin] = {}
        with self._lock:
            for name, pin in reversed(pins.items()):  # the last first
                if name in self._changes or name in self._in_force or name in self._waiting:
                    continue
                if pin is not None and not self._cleared.keys().isdisjoint((None, pin.group)):
                    continue
                if pin is None or _is_over(pin, now):
                    self._changes[name] = None
                    continue
                num_of_group[pin.group] += pin.by_tenant
                if pin.by_tenant and num_of_group[pin.group] > _MAX_OF_TENANT:
                    self._changes[name] = None
                else:
                    found[name] = pin
            for name, pin in [*self._waiting.items(), *self._in_force.items()]:
                if name not in pins:
                    self._changes.setdefault(name, pin)
            self._waiting.update(reversed(found.items()))

    def commit(self, index: SlotIndex) -> None:
        """Write what has changed; one thread at a time.

        Raises:
            sqlite3.Error: nothing was written; the next call tries again.
        """
        with self._lock:
            changes, cleared = dict(self._changes), dict(self._cleared)
        if not changes and not cleared:
            return
        gone = [name for name, pin in changes.items() if pin is None]
        index.change_pins(cleared, gone, [self._encoded(pin) for pin in changes.values() if pin is not None])
        with self._lock:
            # But not what has changed since.
            for group, last_time in cleared.items():
                if self._cleared[group] is last_time:
                    del self._cleared[group]
            for name, pin in changes.items():
                if name in self._changes and self._changes[name] is pin:
                    del self._changes[name]

    def _encoded(self, pin: StoredPin) -> IndexedPin:
        tokens = self._codec.seal(pin.tokens, _bound(pin.name, pin.namespace))
        return IndexedPin(pin.name, pin.group, pin.namespace, pin.by_tenant, pin.expires_at, tokens)

    def _decoded(self, row: IndexedPin) -> StoredPin | None:
        """The pin of a row; None: it makes no sense, or was encrypted for something else."""
        if not _is_sound(row):
            return None
        tokens = self._codec.unseal(row.tokens, _bound(row.name, row.namespace))
        if not tokens or len(tokens) % (TOKEN_BYTES * self._codec.format.block_size):
            return None
        return StoredPin(row.name, row.group, row.namespace, tokens, row.expires_at, bool(row.by_tenant))


def _is_over(pin: StoredPin, now: float) -> bool:
    return pin.expires_at is not None and pin.expires_at <= now


def _bound(name: str, namespace: bytes) -> bytes:
    return name.encode() + namespace


def _is_sound(row: IndexedPin) -> bool:
    """Whether the values have the right types, which SQLite does not enforce."""
    digests: tuple[Any, ...] = (row.group, row.namespace)
    return (
        isinstance(row.name, str)
        and all(isinstance(digest, bytes) and len(digest) == DIGEST_BYTES for digest in digests)
        and isinstance(row.tokens, bytes)
        and isinstance(row.expires_at, float | None)
    )
