"""Prefixes that are kept from eviction, within a quota, until they are released or expire."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from radixkv.cache.errors import ClosedError, InvalidArgumentError, PinQuotaExceeded
from radixkv.cache.lazy_heap import LazyHeap
from radixkv.cache.match import Match
from radixkv.cache.node import Node
from radixkv.cache.radix_tree import RadixTree


class Pin:
    """A prefix kept from eviction. `PrefixCache.pin` makes it.

    Attributes:
        num_tokens: how much of the prompt is kept: whole blocks.
        expires_at: when it expires, by the cache's clock in seconds; None: never.
        released: it no longer keeps anything, because it was released, its namespace was cleared, or it has expired, which is
            noticed when available blocks or pins are next counted.
    """

    def __init__(self, namespace: str, num_tokens: int, expires_at: float | None, *, released: bool = False) -> None:
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.expires_at = expires_at
        self.released = released

    def __repr__(self) -> str:
        if self.released:
            until = "released"
        elif self.expires_at is None:
            until = "until released"
        else:
            until = "until it expires"
        return f"Pin({self.num_tokens} tokens, {until})"


class Pins:
    """One cache's pins. Each holds a lock on the tree node in which its prefix ends.

    Args:
        max_blocks: blocks that may be pinned together.

    Attributes:
        num_blocks: blocks that are pinned.
    """

    def __init__(self, tree: RadixTree, max_blocks: int, clock: Callable[[], float]) -> None:
        self.max_blocks = max_blocks
        self._tree = tree
        self._clock = clock
        self._pins: dict[Pin, Node] = {}
        # Kept up to date, as `Node.num_pins` is: a server may have thousands of pins. Pinned nodes neither grow nor shrink.
        self.num_blocks = 0
        self._expiring = LazyHeap[Pin]()  # those with a time to live, by when it ends

    def __iter__(self) -> Iterator[Pin]:
        return iter(self._pins)

    def add(self, match: Match, namespace: str, ttl: float | None) -> Pin:
        """Pin what was matched; refuses it as `require` does."""
        self.require(match)
        expires_at = None if ttl is None else self._clock() + ttl
        pin = Pin(namespace, match.num_whole_tokens, expires_at)
        self._pins[pin] = last = self._tree.lock(match)
        for node in last.path():
            node.num_pins += 1
            if node.num_pins == 1:
                self.num_blocks += node.num_blocks
        if expires_at is not None:
            self._expiring.push(pin, expires_at)
        return pin

    def require(self, match: Match | None, num_more_blocks: int = 0) -> None:
        """Raise PinQuotaExceeded unless what was matched, and so many blocks that are to continue it, may be pinned."""
        self.release_expired()
        needed = num_more_blocks + self._num_blocks_with(match)
        if needed > self.max_blocks:
            raise PinQuotaExceeded(needed, self.max_blocks)

    def release(self, pin: Pin) -> None:
        """See `PrefixCache.release`."""
        if not isinstance(pin, Pin):
            raise InvalidArgumentError(f"pin: expected a Pin, got {type(pin).__name__}")
        if not pin.released:
            if pin not in self._pins:
                raise ClosedError("pin: it belongs to another cache")
            self._tree.unlock(self._drop(pin))

    @property
    def seconds_until_expiry(self) -> float:
        """No pin expires for this long; infinite if none ever does."""
        return max(0.0, self._expiring.first()[0] - self._clock()) if self._expiring else math.inf

    def release_expired(self) -> None:
        """Release the pins whose time is over."""
        while self._expiring and self._expiring.first()[0] <= self._clock():
            self._tree.unlock(self._drop(self._expiring.first()[1]))

    def forget(self, namespace: str | None) -> None:
        """Drop the pins of a namespace, or of all for None, without unlocking: the tree is about to be cleared."""
        for pin in [pin for pin in self._pins if namespace in (None, pin.namespace)]:
            self._drop(pin)

    def nodes(self) -> list[Node]:
        """The node that each pin has locked."""
        return list(self._pins.values())

    def _drop(self, pin: Pin) -> Node:
        """Forget a pin; returns the node that it has locked."""
        end = self._pins.pop(pin)
        pin.released = True
        if pin.expires_at is not None:
            self._expiring.remove(pin)
        for node in end.path():
            node.num_pins -= 1
            if not node.num_pins:
                self.num_blocks -= node.num_blocks
        return end

    def _num_blocks_with(self, match: Match | None) -> int:
        """Blocks that would be pinned if this match was pinned too."""
        if match is None:
            return self.num_blocks
        last, *above = match.node.path()
        num_more = 0 if last.num_pins else match.num_node_blocks
        return self.num_blocks + num_more + sum(node.num_blocks for node in above if not node.num_pins)
