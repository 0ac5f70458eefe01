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
# One tenant's part of the blocks that may be pinned at all, which are half of the cache's by default.
_TENANT_SHARE = 0.25


@dataclass(frozen=True, slots=True, order=True)
class _Prefix:
    """Whole blocks of tokens, encoded. In order, one that others continue stands right before the first of them."""

    namespace: str
    tokens: bytes

    def is_continued_by(self, other: _Prefix) -> bool:
        """Whether all of it is in the other one."""
        return self.namespace == other.namespace and other.tokens.startswith(self.tokens)


@dataclass(frozen=True, slots=True, eq=False)
class _Kept:
    """A pin with what it keeps."""

    pin: Pin
    prefix: _Prefix
    expires_at: float


class TenantPins:
    """The pins of one cache by tenant, whichever way they were asked for. To be used on the engine's thread.

    A tenant may have `MAX_PINS` pins, and a quarter of the blocks that may be pinned at all; for more than that, its own
    oldest pins are released. Where all tenants together have pinned what may be pinned at all, the one with the most gives up
    its oldest pins to one with less. Where there is still no room, nobody gives up anything.

    A pin that continues an earlier one, as the turns of a chat do, takes its place unless that one lives longer; then the
    blocks of both count once. Of pins that branch, blocks that they share count twice.

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
            How many of its tokens are kept: whole blocks, and no more than the tenant may have; 0 where there is no room, or
            nothing of it is cached.
        """
        cache = self._cache
        self._forget_released()
        max_blocks = int(cache.max_pinned_blocks * _TENANT_SHARE)
        # For what is not cached, no other pin is given up.
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
        # Released when the new pin is there: the blocks that they share count once for the cache.
        for kept in covered:
            self._release(tenant, kept)
        self._kept.setdefault(tenant, []).append(_Kept(pin, new, expires_at))
        return pin.num_tokens

    def _too_much(self, own: list[_Kept], new: _Prefix, max_blocks: int) -> list[_Kept]:
        """Which of a tenant's pins have no room beside a new prefix: the oldest of those that no other one continues."""
        left = own.copy()
        while len(left) >= MAX_PINS or self._num_blocks([new, *(kept.prefix for kept in left)]) > max_blocks:
            for kept in left:
                others = (new, *(other.prefix for other in left if other is not kept))
                if not any(map(kept.prefix.is_continued_by, others)):
                    left.remove(kept)
                    break
            else:
                del left[0]
        return [kept for kept in own if kept not in left]

    def _pin(self, tenant: str, new: _Prefix, ttl: float, released: list[tuple[str, _Kept]]) -> Pin | None:
        """The pin, for which tenants with more may lose some of theirs; None: no tenant has more."""
        tokens = decode(new.tokens)
        num_blocks = self._num_blocks([new, *(kept.prefix for kept in self._kept.get(tenant, []))])
        while True:
            try:
                return self._pins.pin(tokens, new.namespace, ttl, by_tenant=True)
            except PinQuotaExceeded:
                greediest = max(self._kept, key=self._num_blocks_of, default=None)
                if greediest is None or self._num_blocks_of(greediest) <= num_blocks:
                    return None
                oldest = self._kept[greediest][0]
                self._release(greediest, oldest)
                released.append((greediest, oldest))

    def _forget_released(self) -> None:
        """Drop what has expired, or was cleared with the cache."""
        active = set(self._cache.pins())
        kept = {tenant: [kept for kept in own if kept.pin in active] for tenant, own in self._kept.items()}
        self._kept = {tenant: own for tenant, own in kept.items() if own}

    def _release(self, tenant: str, kept: _Kept) -> None:
        self._pins.release(kept.pin)
        self._kept[tenant].remove(kept)

    def _pin_again(self, tenant: str, kept: _Kept) -> None:
        """As the oldest. Nothing was evicted since it was released, and what may be pinned has room for it again."""
        prefix, ttl = kept.prefix, kept.expires_at - self._cache.now()
        if ttl > 0:
            pin = self._pins.pin(decode(prefix.tokens), prefix.namespace, ttl, by_tenant=True)
            self._kept.setdefault(tenant, []).insert(0, _Kept(pin, prefix, kept.expires_at))

    def _num_blocks_of(self, tenant: str) -> int:
        return self._num_blocks(kept.prefix for kept in self._kept[tenant])

    def _num_blocks(self, prefixes: Iterable[_Prefix]) -> int:
        """Blocks of all of them, where one that another continues adds none."""
        ordered = sorted(prefixes)
        ends = (
            prefix
            for prefix, after in zip_longest(ordered, ordered[1:])
            if after is None or not prefix.is_continued_by(after)
        )
        return sum(len(prefix.tokens) for prefix in ends) // (self._cache.block_size * TOKEN_BYTES)
