"""The named pins of an engine's cache; with a disk below the pool, they outlive the process.

::

    pin ──> PrefixCache.pin, now
        └─> StoredPins, and its blocks go down             restart: StoredPins ── the prefix is used ──> in force again

After a restart, a pin waits until a request has loaded or computed its prefix.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import Pin, PinQuotaExceeded, PrefixCache
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, decode, encode
from radixkv.engine.kv_tiers import KVTiers
from radixkv.namespaces import namespace_group
from radixkv.scheduling.request import Request
from radixkv.tiers.disk.stored_pins import StoredPin, StoredPins

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ListedPin:
    """A pin that the administrator or the program asked for, not a tenant.

    Attributes:
        name: unique, even across restarts.
        num_tokens: whole blocks.
        expires_in: seconds; None: it is kept until it is released.
        active: whether it is in force. False: an earlier process made it, and its prefix has not been used since.
    """

    name: str
    num_tokens: int
    expires_in: float | None
    active: bool


@dataclass(frozen=True, slots=True)
class _Named:
    """What is known of a pin beyond the `Pin` itself.

    Attributes:
        stored: what a disk remembers of it; None: no disk does.
        restored: whether it is from before a restart.
    """

    name: str
    by_tenant: bool
    stored: StoredPin | None = None
    restored: bool = False


class NamedPins:
    """All pins of one cache, each with a name; to be used on the engine's thread."""

    def __init__(self, cache: PrefixCache, tiers: KVTiers | None = None) -> None:
        self.cache = cache
        self._tiers = tiers
        self._named: dict[Pin, _Named] = {}

    def pin(self, tokens: TokenIds, namespace: str = "", ttl: float | None = None, *, by_tenant: bool = False) -> Pin:
        """`PrefixCache.pin`, remembered. It replaces a pin of the same prefix from before a restart.

        Args:
            ttl: seconds; None: until it is released.
            by_tenant: a tenant asked for it, and not the administrator.

        Raises:
            PinQuotaExceeded, InvalidArgumentError: as `PrefixCache.pin`.
        """
        pin = self.cache.pin(tokens, namespace, ttl)
        if pin.released:
            return pin
        self._forget_released()
        name = secrets.token_hex(8)
        stored, remembered = self._stored, None
        if stored is not None and self._tiers is not None:
            kept = encode(tokens)[: pin.num_tokens * TOKEN_BYTES]
            group, digest = self._tiers.names_of(namespace)
            self._replace(stored, digest, namespace, kept, by_tenant)
            expires_at = None if ttl is None else time.time() + ttl
            remembered = StoredPin(name, group, digest, kept, expires_at, by_tenant)
            stored.add(remembered)
            self._tiers.send_prefix(kept, namespace)
        self._named[pin] = _Named(name, by_tenant, remembered)
        return pin

    def release(self, pin: Pin) -> None:
        """`PrefixCache.release`, for good."""
        self.cache.release(pin)
        named = self._named.get(pin)
        if named is not None and named.stored is not None and self._stored is None:
            _log.warning("the disk is closed: a released pin of %d tokens will be back after a restart", pin.num_tokens)
        self._forget(pin)

    def store_again(self, cleared: str) -> None:
        """Store those pins of a cleared namespace's group again that are in force: a disk forgets all of the group's."""
        stored = self._stored
        if stored is None or self._tiers is None:
            return
        self._forget_released()
        for pin, named in self._named.items():
            if named.stored is not None and namespace_group(pin.namespace) == namespace_group(cleared):
                stored.add(named.stored)
                self._tiers.send_prefix(named.stored.tokens, pin.namespace)

    def listed(self) -> list[ListedPin]:
        """The pins that no tenant asked for, including those from before a restart that are not in force yet."""
        self._forget_released()
        now, since_1970 = self.cache.now(), time.time()
        listed = [
            ListedPin(named.name, pin.num_tokens, None if pin.expires_at is None else pin.expires_at - now, True)
            for pin, named in self._named.items()
            if not named.by_tenant
        ]
        for pin in [] if self._stored is None else self._stored.waiting():
            if not pin.by_tenant:
                left = None if pin.expires_at is None else pin.expires_at - since_1970
                listed.append(ListedPin(pin.name, len(pin.tokens) // TOKEN_BYTES, left, False))
        return listed

    def name_of(self, pin: Pin) -> str | None:
        """The pin's name, as in `ListedPin`; None: it is released, or belongs to another cache."""
        named = self._named.get(pin)
        return None if named is None or pin.released else named.name

    def release_named(self, name: str) -> bool:
        """Release a pin that `listed` returns; False: there is none of that name."""
        self._forget_released()
        for pin, named in self._named.items():
            if named.name == name and not named.by_tenant:
                self.release(pin)
                return True
        stored = self._stored
        return stored is not None and any(
            stored.remove(pin.name) for pin in stored.waiting() if pin.name == name and not pin.by_tenant
        )

    def restore(self, request: Request, keep: Callable[[str, str, NDArray[np.int32], float], int]) -> None:
        """A request has used its prompt: put pins from before a restart into force whose prefixes the prompt begins with.

        Args:
            request: it has been answered.
            keep: `TenantPins.keep`, which holds a tenant's pins to the tenant's limits; returns 0 if there is no room.
        """
        stored = self._stored
        if stored is None or self._tiers is None or not stored.waiting():
            return
        prompt, namespace = encode(request.prompt_token_ids), request.namespace
        for waiting in stored.waiting(self._tiers.names_of(namespace)[1]):
            if not prompt.startswith(waiting.tokens):
                continue
            tokens = decode(waiting.tokens)
            if self.cache.match(tokens, namespace) < len(tokens):
                continue
            ttl = None if waiting.expires_at is None else waiting.expires_at - time.time()
            if ttl is not None and ttl <= 0:
                continue
            # Without room, a pin stays stored, and is tried again.
            if not waiting.by_tenant:
                with suppress(PinQuotaExceeded):
                    pin = self.cache.pin(tokens, namespace, ttl)
                    stored.comes_into_force(waiting.name)
                    self._named[pin] = _Named(waiting.name, by_tenant=False, stored=waiting, restored=True)
            elif ttl is not None and keep(namespace_group(namespace), namespace, tokens, ttl):
                stored.remove(waiting.name)  # what is kept is stored under a new name

    # -- internals -----------------------------------------------------------------------------------------------

    @property
    def _stored(self) -> StoredPins | None:
        return None if self._tiers is None else self._tiers.pins

    def _replace(self, stored: StoredPins, digest: bytes, namespace: str, tokens: bytes, by_tenant: bool) -> None:
        """Drop older pins of the same prefix: a program that pins it at each start must not accumulate pins."""
        for pin, named in list(self._named.items()):
            is_same = named.stored is not None and named.stored.tokens == tokens and pin.namespace == namespace
            if named.restored and is_same and named.by_tenant == by_tenant:
                self.release(pin)
        for waiting in stored.waiting(digest):
            if waiting.tokens == tokens and waiting.by_tenant == by_tenant:
                stored.remove(waiting.name)

    def _forget_released(self) -> None:
        """Forget pins that were released, have expired, or were cleared with the cache."""
        self.cache.pins()  # notices which have expired
        for pin in [pin for pin in self._named if pin.released]:
            self._forget(pin)

    def _forget(self, pin: Pin) -> None:
        named = self._named.pop(pin, None)
        if named is not None and self._stored is not None:
            self._stored.remove(named.name)
