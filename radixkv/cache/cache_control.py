"""Operations on cached content as a whole: pins, limits of owners, clearing, observers."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from radixkv.cache.arguments import check_count, check_namespace, is_number
from radixkv.cache.cache_view import CacheView
from radixkv.cache.errors import InvalidArgumentError
from radixkv.cache.observer import TreeObserver, check_observer
from radixkv.cache.pin import Pin
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, encode


class CacheControl(CacheView):
    """The part of `PrefixCache` for operators: no call concerns a single sequence."""

    def pin(self, tokens: TokenIds, namespace: str = "", ttl: float | None = None) -> Pin:
        """Keep the cached whole blocks of a prefix from eviction, until `release`, `clear`, or ``ttl`` seconds are over.

        Raises:
            InvalidArgumentError: ``tokens`` are not token ids, ``namespace`` is not a string, or ``ttl`` is not finite and
                above 0.
            PinQuotaExceeded: more than ``max_pinned_blocks`` would be pinned; nothing is.
        """
        check_namespace(namespace)
        _check_ttl(ttl)
        match = self._tree.match(encode(tokens), namespace)
        if match is None or match.num_tokens < self.block_size:
            return Pin(namespace, 0, None, released=True)
        return self._pins.add(match, namespace, ttl)

    def check_pin(self, tokens: TokenIds, namespace: str = "", ttl: float | None = None) -> None:
        """Raise what `pin` would raise if all of ``tokens`` were cached: before they are computed in order to be pinned.

        Raises:
            InvalidArgumentError: as `pin`.
            PinQuotaExceeded: likewise.
        """
        check_namespace(namespace)
        _check_ttl(ttl)
        prefix = encode(tokens)
        match = self._tree.match(prefix, namespace)
        num_cached = 0 if match is None else match.num_tokens // self.block_size
        self._pins.require(match, len(prefix) // (self.block_size * TOKEN_BYTES) - num_cached)

    def pins(self) -> list[Pin]:
        """The pins that are in force."""
        self._pins.release_expired()
        return list(self._pins)

    def release(self, pin: Pin) -> None:
        """Let a pinned prefix be evicted again; a pin that was released, expired or cleared is left as it is.

        Raises:
            InvalidArgumentError: ``pin`` is not a Pin.
            ClosedError: it belongs to another cache.
        """
        self._pins.release(pin)

    def clear(self, namespace: str | None = None) -> int:
        """Drop everything that is cached, of one namespace or of all; returns how many blocks became free.

        Live sequences keep their blocks and go on, but publish nothing more: it could depend on what was to be dropped, such
        as old weights. Pins of what is dropped are released, and its evicted prefixes are no longer remembered.

        Raises:
            InvalidArgumentError: ``namespace`` is neither a string nor None.
        """
        if namespace is not None:
            check_namespace(namespace)
        free_before = self._pool.num_free
        for table in self._tables:
            if namespace in (None, table.namespace):
                table.detach()
        self._pins.forget(namespace)
        self._tree.clear(namespace)
        return self._pool.num_free - free_before

    def limit_owners(self, limits: Mapping[str, int]) -> None:
        """From now on, when blocks are needed, evict first what an owner has cached beyond its limit.

        Blocks in use count too, though they are not evicted. The owner that is furthest beyond its limit loses its least
        recently used leaf first, whatever the policy. The call visits every node of the tree.

        Args:
            limits: blocks by owner (`open`), replacing all earlier limits; owners that are not named have none.

        Raises:
            InvalidArgumentError: a limit is not a whole number of at least 0, or an owner is not a string; nothing is
                changed.
        """
        if not isinstance(limits, Mapping):
            raise InvalidArgumentError(f"limits: expected numbers of blocks by owner, got {limits!r:.80}")
        checked = {}
        for owner, limit in limits.items():
            if not isinstance(owner, str):
                raise InvalidArgumentError(f"limits: expected owners as strings, got {owner!r}")
            checked[owner] = check_count(f"limits[{owner!r}]", limit, 0)
        self._tree.limit_owners(checked)

    def add_observer(self, observer: TreeObserver) -> None:
        """Notify an observer of changes of the tree from now on; `block_hashes` lists what is cached already.

        Raises:
            InvalidArgumentError: it is not a `TreeObserver`.
        """
        check_observer("observer", observer)
        self._tree.observers.add(observer)

    def remove_observer(self, observer: TreeObserver) -> None:
        """Stop notifying an observer.

        Raises:
            InvalidArgumentError: it is not a `TreeObserver`, or was not added, as the cache's policy was not.
        """
        check_observer("observer", observer)
        self._tree.observers.remove(observer)


def _check_ttl(ttl: float | None) -> None:
    if ttl is not None and not (is_number(ttl) and 0 < ttl <= sys.float_info.max):
        raise InvalidArgumentError(f"ttl: expected a finite number of seconds above 0, or None, got {ttl!r:.80}")
