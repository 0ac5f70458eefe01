"""The interface between the kit and a cache under test, and the adapter of RadixKV's own cache."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from typing import Any

from radixkv.cache import BlockCopy, BlockTable, EvictionPolicy, NodeSnapshot, OutOfBlocks, PrefixCache

__all__ = ["BlockCopy", "CacheAdapter", "PrefixCacheAdapter"]


class CacheAdapter(abc.ABC):
    """A cache under test. A handle is any object that the cache uses for a live sequence; the kit never looks inside.

    The kit plays the engine: it reserves slots, carries out block copies, writes keys and values into a shadow memory, and
    then commits the tokens.

    Attributes:
        num_blocks: physical blocks, with ids from 0 on.
        block_size: tokens per block.
        matches_tokens: matches end at any token; False: only at block boundaries (for rule 4).
        deduplicates: a block that two live sequences computed is kept once, and both then hold that one (rule 11).
        keeps_closed: what a sequence computed is cached for later prompts when it is closed; False: the allocator shares
            blocks between forks only, or may forget (rule 4).
        evicts_exactly: a call evicts no more blocks than it lacks; False: whole leaves, or some in advance (rule 6).
    """

    num_blocks: int
    block_size: int
    matches_tokens: bool = True
    deduplicates: bool = True
    keeps_closed: bool = True
    evicts_exactly: bool = True

    @abc.abstractmethod
    def match(self, prompt: Sequence[int], namespace: str) -> int:
        """How many leading tokens of ``prompt`` are cached. Must change nothing."""

    @abc.abstractmethod
    def open(self, prompt: Sequence[int], namespace: str) -> Any | None:
        """Begin a sequence on the cached prefix of its prompt; None where there are not enough blocks."""

    @abc.abstractmethod
    def reserve(self, handle: Any, num_tokens: int) -> bool:
        """Make the slots from ``length`` up to ``num_tokens`` writable; False where there are not enough blocks."""

    @abc.abstractmethod
    def take_copies(self) -> Iterable[BlockCopy]:
        """The block copies to be carried out now, in this order, since the last call."""

    @abc.abstractmethod
    def commit(self, handle: Any, tokens: Sequence[int]) -> None:
        """The next tokens' keys and values are written."""

    @abc.abstractmethod
    def fork(self, handle: Any) -> Any | None:
        """One more sequence that goes on from where this one is; None where it takes blocks and there are not enough."""

    @abc.abstractmethod
    def close(self, handle: Any) -> None:
        """End a sequence that may stay cached."""

    @abc.abstractmethod
    def abort(self, handle: Any) -> None:
        """End a sequence without caching more of it."""

    @abc.abstractmethod
    def clear(self, namespace: str) -> None:
        """Drop what is cached under a namespace. Live sequences go on, and may publish what they compute next."""

    @abc.abstractmethod
    def length(self, handle: Any) -> int:
        """Tokens of the sequence whose keys and values are in its blocks."""

    @abc.abstractmethod
    def blocks(self, handle: Any) -> Sequence[int]:
        """The sequence's blocks: that of position p is ``blocks[p // block_size]``."""

    @abc.abstractmethod
    def free_blocks(self) -> Iterable[int]:
        """Blocks without an owner."""

    @abc.abstractmethod
    def cached_blocks(self) -> Iterable[int]:
        """Blocks that the cache itself owns, so that later prompts can use them."""

    def ref_counts(self) -> Sequence[int] | None:
        """Owners of each block as the cache counts them; None where it does not."""
        return None

    def known_sequences(self, namespace: str) -> Iterable[Sequence[int]] | None:
        """Token sequences whose prefixes are all that is cached; None where the cache does not report them."""
        return None

    def check(self) -> None:  # noqa: B027 - a cache need not have a check of its own
        """The cache's own consistency check: raises if something is wrong."""


class PrefixCacheAdapter(CacheAdapter):
    """RadixKV's cache, with any eviction policy."""

    def __init__(self, num_blocks: int, block_size: int, policy: EvictionPolicy | None = None) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.cache = PrefixCache(num_blocks, block_size, policy)

    def match(self, prompt: Sequence[int], namespace: str) -> int:
        return self.cache.match(prompt, namespace)

    def open(self, prompt: Sequence[int], namespace: str) -> BlockTable | None:
        try:
            return self.cache.open(prompt, namespace)
        except OutOfBlocks:
            return None

    def reserve(self, handle: BlockTable, num_tokens: int) -> bool:
        try:
            self.cache.reserve(handle, num_tokens)
        except OutOfBlocks:
            return False
        return True

    def take_copies(self) -> list[BlockCopy]:
        return self.cache.drain_copies()

    def commit(self, handle: BlockTable, tokens: Sequence[int]) -> None:
        self.cache.append(handle, tokens)

    def fork(self, handle: BlockTable) -> BlockTable:
        return self.cache.fork(handle)[0]

    def close(self, handle: BlockTable) -> None:
        self.cache.close(handle)

    def abort(self, handle: BlockTable) -> None:
        self.cache.abort(handle)

    def clear(self, namespace: str) -> None:
        self.cache.clear(namespace)

    def length(self, handle: BlockTable) -> int:
        return handle.num_tokens

    def blocks(self, handle: BlockTable) -> list[int]:
        blocks: list[int] = handle.block_ids.tolist()
        return blocks

    def free_blocks(self) -> list[int]:
        return [block for block, count in enumerate(self.ref_counts()) if count == 0]

    def cached_blocks(self) -> list[int]:
        return [
            int(block)
            for root in self.cache.tree_snapshot().values()
            for node, _ in _walk(root)
            for block in node.block_ids
        ]

    def ref_counts(self) -> list[int]:
        counts: list[int] = self.cache.ref_counts().tolist()
        return counts

    def known_sequences(self, namespace: str) -> list[list[int]]:
        root = self.cache.tree_snapshot().get(namespace)
        return [] if root is None else [path for node, path in _walk(root) if not node.children]

    def check(self) -> None:
        self.cache.check()


def _walk(root: NodeSnapshot) -> Iterable[tuple[NodeSnapshot, list[int]]]:
    """Every node with all tokens down to its end."""
    pending: list[tuple[NodeSnapshot, list[int]]] = [(root, [])]
    while pending:
        node, before = pending.pop()
        path = before + node.tokens.tolist()
        yield node, path
        pending.extend((child, path) for child in node.children)
