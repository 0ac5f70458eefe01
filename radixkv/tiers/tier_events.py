"""Events of what tiers hold, beside those of the pool, for routers that count what can be loaded.

A tier has only digests of its blocks. Their names in the pool's events are noted when their keys are made; so blocks
that an earlier process left have no event until they are asked for.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from radixkv.cache.block_hash import namespace_hash, next_hashes
from radixkv.cache.events import BlocksRemoved, BlocksStored, CacheEvent
from radixkv.cache.tokens import TOKEN_BYTES, decode
from radixkv.tiers.block_key import BlockKey

# Names are remembered for this many blocks: enough for those that may wait to be written.
_MAX_NOTED = 1 << 16


class TierObserver(Protocol):
    """Notified, by any thread, of what one tier holds. It must neither wait nor call the tier."""

    def on_stored(self, keys: Sequence[BlockKey]) -> None:
        """These blocks are there; the observer may have been notified of them before."""

    def on_removed(self, digests: Sequence[bytes]) -> None:
        """These blocks are not there any more."""


class _Name(NamedTuple):
    """A block's name in the pool's events."""

    block_hash: int
    parent_hash: int | None
    namespace_hash: int


class TierEvents:
    """Makes events of what several tiers hold; any thread may call.

    Args:
        block_size: tokens per block.
        publish: takes events; any thread may call it.
    """

    def __init__(self, block_size: int, publish: Callable[[Sequence[CacheEvent]], None]) -> None:
        self.block_size = block_size
        self._publish = publish
        self._noted: OrderedDict[bytes, _Name] = OrderedDict()  # by digest, oldest first
        self._lock = threading.Lock()

    def note(self, namespace: str, tokens: bytes, keys: Sequence[BlockKey]) -> None:
        """Note the names of a prefix's blocks, of which ``tokens`` are the encoded tokens and ``keys`` all keys."""
        seed = namespace_hash(namespace)
        hashes = next_hashes(seed, tokens, TOKEN_BYTES * self.block_size)
        parents: list[int | None] = [None, *hashes]
        with self._lock:
            for key, block_hash, parent in zip(keys, hashes, parents, strict=False):
                self._noted[key.digest] = _Name(block_hash, parent, seed)
                self._noted.move_to_end(key.digest)
            while len(self._noted) > _MAX_NOTED:
                self._noted.popitem(last=False)

    def of(self, medium: str) -> TierObserver:
        """An observer for one tier, which events call ``medium``."""
        return _MediumEvents(self, medium)

    def name_of(self, digest: bytes) -> _Name | None:
        """The name that was noted of a block."""
        with self._lock:
            return self._noted.get(digest)

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Publish the events, if there are any."""
        if events:
            self._publish(events)


class _MediumEvents(TierObserver):
    def __init__(self, events: TierEvents, medium: str) -> None:
        self._events = events
        self._medium = medium
        self._announced: dict[bytes, _Name] = {}
        # Held while events are published, so that these are in the order of the changes.
        self._lock = threading.Lock()

    def on_stored(self, keys: Sequence[BlockKey]) -> None:
        with self._lock:
            runs: list[list[tuple[BlockKey, _Name]]] = []
            for key in keys:
                name = self._events.name_of(key.digest)
                if name is None or key.digest in self._announced:
                    continue
                self._announced[key.digest] = name
                if runs and runs[-1][-1][1].block_hash == name.parent_hash:
                    runs[-1].append((key, name))
                else:
                    runs.append([(key, name)])
            self._events.publish([self._stored(run) for run in runs])

    def on_removed(self, digests: Sequence[bytes]) -> None:
        with self._lock:
            names = [self._announced.pop(digest) for digest in digests if digest in self._announced]
            by_namespace: dict[int, list[int]] = {}
            for name in names:
                by_namespace.setdefault(name.namespace_hash, []).append(name.block_hash)
            self._events.publish(
                [BlocksRemoved(tuple(hashes), seed, self._medium) for seed, hashes in by_namespace.items()]
            )

    def _stored(self, run: Sequence[tuple[BlockKey, _Name]]) -> BlocksStored:
        first = run[0][1]
        return BlocksStored(
            tuple(name.block_hash for _, name in run),
            first.parent_hash,
            tuple(decode(b"".join(key.tokens for key, _ in run)).tolist()),
            self._events.block_size,
            first.namespace_hash,
            self._medium,
        )
