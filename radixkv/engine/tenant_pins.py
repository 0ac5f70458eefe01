"""The prefixes that tenants keep cached by `cache_control`, within bounds for each tenant."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Pin, PinQuotaExceeded
from radixkv.engine.named_pins import NamedPins

MAX_PINS = 64
# Of the blocks that may be pinned at all, by default half of the cache's.
_TENANT_SHARE = 0.25


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A pin with what it keeps."""

    pin: Pin
    tokens: NDArray[np.int32]
    expires_at: float
    num_blocks: int

    def covers(self, namespace: str, tokens: NDArray[np.int32], expires_at: float) -> bool:
        """Whether it keeps all of these tokens, for as long."""
        return self.pin.namespace == namespace and self.expires_at >= expires_at and _is_prefix(tokens, self.tokens)

    def is_covered_by(self, namespace: str, tokens: NDArray[np.int32], expires_at: float) -> bool:
        """Whether a pin of these tokens would keep all that this one does, for as long."""
        return self.pin.namespace == namespace and self.expires_at <= expires_at and _is_prefix(self.tokens, tokens)


class TenantPins:
    """The pins of one cache by tenant, whichever way they were asked for. To be used on the engine's thread.

    A tenant may have `MAX_PINS` pins, and a quarter of the blocks that may be pinned at all; for more than that, its own
    oldest pins are released. Where all tenants together have pinned what may be pinned at all, the one with the most gives up
    its oldest pin to one with less.

    A pin that continues an earlier one, as the turns of a chat do, takes its place. Blocks that two pins share count twice.

    Args:
        pins: all pins of the cache in which they are.
    """

    def __init__(self, pins: NamedPins) -> None:
        self._pins = pins
        self._cache = pins.cache
        # By tenant, the oldest first.
        self._kept: dict[str, list[_Kept]] = {}

    def keep(self, tenant: str, namespace: str, token_ids: Sequence[int] | NDArray[np.int32], ttl: float) -> int:
        """Keep the cached part of a prefix from eviction.

        Args:
            tenant: on whose behalf.
            namespace: of the prefix.
            token_ids: of the prefix.
            ttl: seconds for which it is kept.

        Returns:
            How many of its tokens are kept: whole blocks, and no more than the tenant may have; 0 where there is no room.
        """
        cache = self._cache
        self._forget_released()
        max_blocks = int(cache.max_pinned_blocks * _TENANT_SHARE)
        num_blocks = min(len(token_ids) // cache.block_size, max_blocks)
        if num_blocks == 0:
            return 0
        tokens = np.asarray(token_ids[: num_blocks * cache.block_size], dtype=np.int32)
        expires_at = cache.now() + ttl
        own = self._kept.setdefault(tenant, [])
        if any(kept.covers(namespace, tokens, expires_at) for kept in own):
            return len(tokens)
        # Released when the new pin is there, which may have no room; the blocks that they share count once for the cache.
        covered = [kept for kept in own if kept.is_covered_by(namespace, tokens, expires_at)]
        own[:] = [kept for kept in own if kept not in covered]
        while own and (len(own) >= MAX_PINS or self._num_blocks(tenant) + num_blocks > max_blocks):
            self._release(tenant, own[0])
        pin = self._pin(tenant, namespace, tokens, ttl)
        if pin is None or pin.released:
            own += covered
            return 0
        for kept in covered:
            self._pins.release(kept.pin)
        num_pinned = pin.num_tokens // cache.block_size
        own.append(_Kept(pin, tokens[: pin.num_tokens], expires_at, num_pinned))
        return pin.num_tokens

    def _pin(self, tenant: str, namespace: str, tokens: NDArray[np.int32], ttl: float) -> Pin | None:
        """The pin, for which tenants with more may lose some of theirs; None: no tenant has more."""
        num_blocks = self._num_blocks(tenant) + len(tokens) // self._cache.block_size
        while True:
            try:
                return self._pins.pin(tokens, namespace, ttl, by_tenant=True)
            except PinQuotaExceeded:
                greediest = max(self._kept, key=self._num_blocks)
                if self._num_blocks(greediest) <= num_blocks:
                    return None
                self._release(greediest, self._kept[greediest][0])

    def _forget_released(self) -> None:
        """Drop what has expired, or was cleared with the cache."""
        active = set(self._cache.pins())
        kept = {tenant: [kept for kept in own if kept.pin in active] for tenant, own in self._kept.items()}
        self._kept = {tenant: own for tenant, own in kept.items() if own}

    def _release(self, tenant: str, kept: _Kept) -> None:
        self._pins.release(kept.pin)
        self._kept[tenant].remove(kept)

    def _num_blocks(self, tenant: str) -> int:
        return sum(kept.num_blocks for kept in self._kept[tenant])


def _is_prefix(short: NDArray[np.int32], long: NDArray[np.int32]) -> bool:
    return len(short) <= len(long) and bool((short == long[: len(short)]).all())
