"""Prefixes that are kept from eviction."""

from __future__ import annotations

from radixkv.cache.node import Node


class Pin:
    """A prefix kept from eviction. `PrefixCache.pin` makes it.

    Attributes:
        num_tokens: how much of the prompt is kept: whole blocks.
        expires_at: when it releases itself, by the cache's clock in seconds; None: never.
        released: it keeps nothing any more: released, expired or cleared.
    """

    def __init__(self, namespace: str, num_tokens: int, expires_at: float | None, node: Node | None) -> None:
        self.namespace = namespace
        self.num_tokens = num_tokens
        self.expires_at = expires_at
        self.released = node is None
        self._node = node

    def __repr__(self) -> str:
        until = "released" if self.released else f"until {self.expires_at}" if self.expires_at else "until released"
        return f"Pin({self.num_tokens} tokens, {until})"
