"""The tiers below one engine's pool: where blocks go when they are evicted, and come back from, even after a restart.

::

    pool ── BlockMoves: evicted or reused blocks ──> BlockWriter ──> TierStack: host, disk, shared store ...
         <── PrefixLoads: waiting requests' prefixes ── BlockLoader <──┘

The engine calls `publish_done` and `before_pool_writes` once per step; only other threads touch a medium.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.cache import BlockCopy, PrefixCache
from radixkv.cache.tokens import TOKEN_BYTES
from radixkv.config import CacheWritePolicy
from radixkv.memory import KVPool
from radixkv.memory.block_rows import BlockRows
from radixkv.memory.pages import take_pages
from radixkv.namespaces import namespace_group
from radixkv.observe.prompt_explanation import TierPart
from radixkv.routing import PrefillRate
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.tiers.disk.other_stores import OtherStores
from radixkv.tiers.disk.stored_pins import StoredPins
from radixkv.tiers.moves.block_moves import BlockMoves
from radixkv.tiers.moves.known_blocks import KnownBlocks
from radixkv.tiers.moves.loader import BlockLoader
from radixkv.tiers.moves.prefix_keys import PrefixKeys
from radixkv.tiers.moves.prefix_search import find_prefix
from radixkv.tiers.moves.rates import Rates
from radixkv.tiers.moves.writer import BlockWriter
from radixkv.tiers.stack import TierStack
from radixkv.tiers.stats import TierTotals
from radixkv.tiers.tier import Tier
from radixkv.tiers.tier_events import TierEvents

_log = logging.getLogger(__name__)

_MAX_QUEUED_BYTES = 256 << 20
# Capacity of tiers whose size is not known here.
MANY_BLOCKS = 1 << 20
# How long an engine that can only wait for tiers waits before it looks for new requests.
_IDLE_SECONDS = 0.01
# At most this much of the time for closing is reserved for the tiers themselves, so that a hanging write cannot use it up.
_CLOSE_SECONDS = 2.0


@dataclass(slots=True)
class TierSet:
    """The tiers below one pool, and what is known of them once they are open.

    Attributes:
        tiers: the nearest first, at least one.
        capacity: of the smallest tier, in blocks; `MANY_BLOCKS` if no size is known.
        lasting_capacity: of the smallest of the tiers that this process writes and that outlive it.
        num_stored: blocks left from earlier runs, as far as is known.
        pins: those that the disk remembers; None: this process writes no disk.
        events: of what they hold; None: none are recorded.
        other_stores: the other stores in the disk's folder; None: as for ``pins``.
    """

    tiers: list[Tier] = field(default_factory=list)
    capacity: int = MANY_BLOCKS
    lasting_capacity: int = MANY_BLOCKS
    num_stored: int = 0
    pins: StoredPins | None = None
    events: TierEvents | None = None
    other_stores: OtherStores | None = None


class KVTiers:
    """Everything below the pool, for one engine; all methods are for the engine's thread.

    Args:
        cache: of the engine; from now on, its changes are observed.
        fingerprint: see `radixkv.engine.block_fingerprint`.
        secret: of the hash of namespaces, at most 64 bytes.
        prefill_rate: what computing costs, as the engine learns it.

    Attributes:
        loads: the prefixes that come up.
    """

    def __init__(
        self,
        cache: PrefixCache,
        pool: KVPool,
        opened: TierSet,
        fingerprint: bytes,
        secret: bytes,
        policy: CacheWritePolicy,
        prefill_rate: PrefillRate,
    ) -> None:
        block_bytes = pool.block_size * TOKEN_BYTES
        self._pins = opened.pins
        self._other_stores = opened.other_stores
        self._lasting_capacity = opened.lasting_capacity
        self._rows = BlockRows(pool)
        self._keys = PrefixKeys(fingerprint, secret, block_bytes, opened.events)
        self._stack = TierStack(opened.tiers)
        self._rates = Rates(len(opened.tiers), prefill_rate)
        self._writer = BlockWriter(self._stack, self._keys, self._rows.nbytes, _MAX_QUEUED_BYTES)
        make_buffer = _pinned_memory if pool.keys[0].is_cuda else _resident_memory
        self._loader = BlockLoader(
            self._stack, self._writer, self._keys, self._rows, make_buffer, opened.num_stored, time.monotonic
        )
        # The first tokens of a block are not kept where it holds states, which are those after all of its tokens.
        keeps_partly_filled = self._stack.keeps_partly_filled and pool.states is None
        known = KnownBlocks(opened.capacity)
        moves = BlockMoves(self._rows, self._writer, known, policy, block_bytes, keeps_partly_filled, self._clear)
        self.loads = PrefixLoads(cache, self._loader, self._rates, self._stack.media, time.monotonic, moves)
        self._cache = cache
        self._moves = moves
        self._closed = False
        self._to_clear: dict[str | None, None] | None = None  # groups to clear; None: each is cleared at once
        cache.add_observer(moves)

    @property
    def pins(self) -> StoredPins | None:
        """Pins that outlive the process; None: no tier remembers any."""
        return None if self._closed else self._pins

    def names_of(self, namespace: str) -> tuple[bytes, bytes]:
        """The names of a namespace below the pool: that of its group, and its own."""
        return self._keys.group(namespace), self._keys.namespace(namespace)

    def send_prefix(self, tokens: bytes, namespace: str) -> None:
        """Have a cached prefix written, whatever the policy; its tokens are whole blocks, encoded."""
        if not self._closed:
            self._moves.want_prefix(tokens, namespace)

    @property
    def totals(self) -> TierTotals:
        """The counters now."""
        loads = self.loads
        return TierTotals(
            tuple(zip(self._stack.media, self._stack.stats, strict=True)),
            loads.num_loads,
            loads.num_given_up,
            loads.num_not_worth_it,
            self._writer.num_dropped,
        )

    def find(self, tokens: bytes, namespace: str, num_cached_tokens: int) -> tuple[TierPart, ...]:
        """What tiers have of a prompt, given encoded, beyond what is cached. May wait for a server; any thread may call."""
        if self._closed:
            return ()
        size = self._keys.block_bytes // TOKEN_BYTES
        most = len(tokens) // TOKEN_BYTES - 1  # the last token of a prompt is always computed, for its logits
        keys, spans = find_prefix(self._stack, self._keys, namespace, tokens, num_cached_tokens // size)
        below = []
        for span in spans:
            start = span.start * size
            stop = min(most, start + sum(len(key.tokens) for key in keys[span.start : span.stop]) // TOKEN_BYTES)
            if stop > num_cached_tokens:
                medium, seconds = self._stack.media[span.tier], self._rates.load_seconds([span])
                below.append(TierPart(medium, start, stop - start, seconds))
        return tuple(below)

    def before_pool_writes(self, copy_blocks: Callable[[list[BlockCopy]], None]) -> None:
        """Before a step writes anything into the pool: read the blocks that go down, and let loads begin.

        Args:
            copy_blocks: carries out the cache's queued copies: their sources may be blocks that a load is about to overwrite.
        """
        if self._closed:
            return
        self._moves.send_down(self._cache)
        self.loads.send_look_ups()
        if self.loads.has_reserved:
            copy_blocks(self._cache.drain_copies())
            self.loads.begin(self._rows.fence())

    def wait(self) -> bool:
        """Wait a moment for a load or a look-up; False: none is in progress."""
        if not self.loads.in_progress:
            return False
        self.loads.wait_for_progress(_IDLE_SECONDS)
        return True

    def flush(self, timeout: float) -> bool:
        """Write everything that is due to go down; False if ``timeout`` seconds were not enough. Not during a step."""
        if self._closed:
            return True
        deadline = time.monotonic() + timeout
        self._moves.send_down(self._cache)
        self._moves.write_wanted(self._cache, lambda: deadline - time.monotonic())
        return self._writer.flush(max(0.0, deadline - time.monotonic())) and not self._moves.has_wanted

    def send_some(self) -> bool:
        """End loads that no request waits for, and send some of the blocks that are due to go down; False: there are none.

        Not during a step. It waits a moment if the blocks cannot be queued yet.
        """
        if self._closed:
            return False
        self.loads.end_unwanted()
        if not self._moves.has_wanted:
            return False
        self._moves.send_down(self._cache, _IDLE_SECONDS)
        return True

    def write_hot(self, seconds_left: Callable[[], float]) -> None:
        """Write what is cached, most recently used first, while there is time left. Not during a step."""
        if not self._closed:
            self._moves.send_down(self._cache)
            self._moves.write_hot(self._cache, self._lasting_capacity, seconds_left)

    def close(self, grace_seconds: float) -> None:
        """End all loads, write what is queued, and close the tiers; the pool is used without them from then on.

        Args:
            grace_seconds: after this time, what is still queued is lost.
        """
        if self._closed:
            return
        self._closed = True
        self._moves.stop()
        self.loads.stop()
        closing = min(_CLOSE_SECONDS, grace_seconds / 4)
        deadline = time.monotonic() + grace_seconds - closing

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        finished = self._writer.stop(left())
        num_lost = self._writer.num_queued
        finished &= self._loader.stop(left())
        finished &= self._stack.close(left() + closing)
        if self._other_stores is not None:
            finished &= self._other_stores.stop(left() + closing)
        if not finished:
            _log.warning(
                "closing the tiers below the pool took longer than %s s; %d blocks were not written, and perhaps more that "
                "the tiers had queued themselves",
                grace_seconds,
                num_lost,
            )

    @contextmanager
    def clearing_groups_once(self) -> Iterator[None]:
        """Clear each group of namespaces below the pool once, at the end, however many of them the cache forgets meanwhile.

        A tenant may have thousands, one for each salt, and each clearing takes a transaction on a disk.
        """
        self._to_clear = {}
        try:
            yield
        finally:
            groups, self._to_clear = self._to_clear, None
            for group in groups:
                self._clear_group(group)

    def _clear(self, namespace: str | None) -> None:
        group = None if namespace is None else namespace_group(namespace)
        if self._to_clear is None:
            self._clear_group(group)
        else:
            self._to_clear[group] = None

    def _clear_group(self, group: str | None) -> None:
        if self._closed:
            _log.warning("the tiers below the pool are closed: what is cleared now stays in them")
            return
        self._stack.clear(None if group is None else self._keys.group(group))
        if group is not None and self._other_stores is not None:
            self._other_stores.clear(group)


def _pinned_memory(num_blocks: int, block_nbytes: int) -> NDArray[np.uint8]:
    """Memory that a GPU copies to and from by itself; torch rounds its size up to a power of two."""
    array: NDArray[np.uint8] = torch.empty(num_blocks, block_nbytes, dtype=torch.uint8, pin_memory=True).numpy()
    return array


def _resident_memory(num_blocks: int, block_nbytes: int) -> NDArray[np.uint8]:
    array: NDArray[np.uint8] = np.empty((num_blocks, block_nbytes), dtype=np.uint8)
    take_pages(array.ctypes.data, array.nbytes)
    return array
