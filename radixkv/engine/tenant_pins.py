"""The prefixes that tenants have marked to stay cached, within bounds for each tenant."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Pin, PinQuotaExceeded
from radixkv.cache.tokens import TOKEN_BYTES, decode, encode
from radixkv.engine.named_pins import NamedPins

MAX_PINS = 64
# One tenant's share of the blocks that may be pinned in all, which are half of the cache's by default.
_TENANT_SHARE = 0.25


@dataclass(frozen=True, slots=True, order=True)
class _Prefix:
    """Whole blocks of tokens, encoded. Sorted, a prefix stands right before the first one that continues it."""

    namespace: str
    tokens: bytes

    def is_continued_by(self, other: _Prefix) -> bool:
        """Whether the other prefix begins with this one."""
        return self.namespace == other.namespace and other.tokens.startswith(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A pin with what it keeps."""

    pin: Pin
    prefix: _Prefix
    expires_at: float


class TenantPins:
    """The pins of one cache by tenant, however they were asked for. To be used on the engine's thread.

    A tenant may have `MAX_PINS` pins, and a quarter of the blocks that may be pinned in all; beyond that, its own oldest pins
    are released. When all tenants together have used up the blocks that may be pinned, the tenant with the most gives up its
    oldest pins to one with fewer. If there is still no room, no pin is released.

    A pin that continues an earlier one, as the turns of a chat do, replaces it, unless the earlier one lives longer; then
    their common blocks count once. Blocks that are shared by pins which branch count twice.
    """

    def __init__(self, pins: NamedPins) -> None:
        self._pins = pins
        self._cache = pins.cache
        # By tenant, the oldest first, and how many blocks these are.
        self._kept: dict[str, list[_Kept]] = {}
        self._num_blocks: dict[str, int] = {}

    def keep(self, tenant: str, namespace: str, token_ids: Sequence[int] | NDArray[np.int32], ttl: float) -> int:
        """Keep the cached part of a prefix from eviction.

        Args:
            ttl: seconds for which it is kept.

        Returns:
            How many of its tokens are kept: whole blocks, and no more than the tenant may have; 0 if there is no room, or
            nothing of it is cached.
        """
        cache = self._cache
        self._forget_released()
        max_blocks = int(cache.max_pinned_blocks * _TENANT_SHARE)
        # Only cached blocks count: no other pin is given up for blocks that are not.
        num_blocks = min(cache.match(token_ids, namespace) // cache.block_size, max_blocks)
        if num_blocks == 0:
            return 0
        num_tokens = num_blocks * cache.block_size
        new = _Prefix(namespace, encode(token_ids[:num_tokens]))
        expires_at = cache.now() + ttl
        own = self._kept.get(tenant, [])
        if any(new.is_continued_by(kept.prefix) and kept.expires_at >= expires_at for kept in own):
            return num_tokens
        covered = [kept for kept in own if kept.prefix.is_continued_by(new) and kept.expires_at <= expires_at]
        released: list[tuple[str, _Kept]] = []
        for kept in self._too_much([kept for kept in own if kept not in covered], new, max_blocks):
            self._release(tenant, kept)
            released.append((tenant, kept))
        pin = self._pin(tenant, new, ttl, released)
        if pin is None or pin.released:
            for owner, kept in reversed(released):
                self._pin_again(owner, kept)
            return 0
        # Released only once the new pin is there, since the cache counts shared blocks once.
        for kept in covered:
            self._release(tenant, kept)
        self._set(tenant, [*self._kept.get(tenant, []), _Kept(pin, new, expires_at)])
        return pin.num_tokens

    def _too_much(self, own: list[_Kept], new: _Prefix, max_blocks: int) -> list[_Kept]:
        """Which of a tenant's pins must make room for a new prefix: the oldest of those that no other one continues."""
        left = own.copy()
        while len(left) >= MAX_PINS or self._count([new, *(kept.prefix for kept in left)]) > max_blocks:
            for kept in left:
                others = (new, *(other.prefix for other in left if other is not kept))
                if not any(map(kept.prefix.is_continued_by, others)):
                    left.remove(kept)
                    break
            else:
                del left[0]
        return [kept for kept in own if kept not in left]

    def _pin(self, tenant: str, new: _Prefix, ttl: float, released: list[tuple[str, _Kept]]) -> Pin | None:
        """Pin the prefix, releasing pins of tenants with more blocks if needed; None: no tenant has more."""
        tokens = decode(new.tokens)
        num_blocks = self._count([new, *(kept.prefix for kept in self._kept.get(tenant, []))])
        while True:
            try:
                return self._pins.pin(tokens, new.namespace, ttl, by_tenant=True)
            except PinQuotaExceeded:
                greediest = max(self._num_blocks, key=self._num_blocks.__getitem__, default=None)
                if greediest is None or self._num_blocks[greediest] <= num_blocks:
                    return None
                oldest = self._kept[greediest][0]
                self._release(greediest, oldest)
                released.append((greediest, oldest))

    def _forget_released(self) -> None:
        """Forget pins that have expired, or were cleared with the cache."""
        self._cache.pins()  # notices which have expired
        for tenant, own in list(self._kept.items()):
            if any(kept.pin.released for kept in own):
                self._set(tenant, [kept for kept in own if not kept.pin.released])

    def _release(self, tenant: str, kept: _Kept) -> None:
        self._pins.release(kept.pin)
        self._set(tenant, [each for each in self._kept[tenant] if each is not kept])

    def _pin_again(self, tenant: str, kept: _Kept) -> None:
        """Restore a released pin as the oldest: nothing was evicted since, and there is room for it again."""
        prefix, ttl = kept.prefix, kept.expires_at - self._cache.now()
        if ttl > 0:
            pin = self._pins.pin(decode(prefix.tokens), prefix.namespace, ttl, by_tenant=True)
            self._set(tenant, [_Kept(pin, prefix, kept.expires_at), *self._kept.get(tenant, [])])

    def _set(self, tenant: str, own: list[_Kept]) -> None:
        if own:
            self._kept[tenant], self._num_blocks[tenant] = own, self._count(kept.prefix for kept in own)
        else:
            del self._kept[tenant], self._num_blocks[tenant]

    def _count(self, prefixes: Iterable[_Prefix]) -> int:
        """The blocks of all prefixes, where one that another continues adds none."""
        ordered = sorted(prefixes)
        ends = (
            prefix
            for prefix, after in zip_longest(ordered, ordered[1:])
            if after is None or not prefix.is_continued_by(after)
        )
        return sum(len(prefix.tokens) for prefix in ends) // (self._cache.block_size * TOKEN_BYTES)
