"""Queries that leave a cache unchanged: for routers, inspection and metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.arguments import check_count, check_namespace
from radixkv.cache.block_pool import BlockIds
from radixkv.cache.block_store import BlockStore
from radixkv.cache.block_table import BlockTable
from radixkv.cache.continuation import continuation
from radixkv.cache.errors import ClosedError, InvalidArgumentError
from radixkv.cache.explanation import Explanation, explain
from radixkv.cache.invariants import check_cache
from radixkv.cache.outline import NodeOutline, outline
from radixkv.cache.snapshot import NodeSnapshot, snapshot
from radixkv.cache.stats import CacheStats
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, encode, encode_prompt


class Demand(NamedTuple):
    """What a sequence takes when it begins.

    Attributes:
        num_cached_tokens: cached tokens of its prompt.
        num_blocks: available blocks that it takes: those for what is not cached, and cached ones that it keeps from eviction.
    """

    num_cached_tokens: int
    num_blocks: int


class CacheView:
    """The part of `PrefixCache` that only reads.

    Only the thread that changes the cache may use it: a query from another thread can even break a change in progress.
    A query that counts what keeps blocks from eviction first releases the pins that have expired.

    Args:
        store: the cache's blocks, tree, pins and memory of evicted prefixes.
        clock: the cache's, in seconds.
    """

    def __init__(self, store: BlockStore, clock: Callable[[], float]) -> None:
        self.block_size = store.block_size
        self._store = store
        self._pool = store.pool
        self._tree = store.tree
        self._pins = store.pins
        self._stats = store.stats
        self._clock = clock
        self._tables: set[BlockTable] = set()

    @property
    def num_blocks(self) -> int:
        """Physical blocks, free ones included."""
        return self._pool.num_blocks

    @property
    def splits_blocks(self) -> bool:
        """Whether the first tokens of a block may be reused without the rest."""
        return self._tree.splits_blocks

    @property
    def num_free_blocks(self) -> int:
        """Blocks without an owner."""
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks with an owner: live sequences, the tree, or both."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that only the tree owns, and that eviction could free."""
        return self._store.num_evictable

    @property
    def num_available_blocks(self) -> int:
        """Free and evictable blocks."""
        return self._store.num_available

    @property
    def copy_targets(self) -> set[int]:
        """The blocks that hold what they should only once the queued copies are carried out (`PrefixCache.drain_copies`)."""
        return self._store.copy_targets

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those that have something cached or in use."""
        return tuple(self._tree.roots)

    @property
    def max_pinned_blocks(self) -> int:
        """Blocks that may be pinned together."""
        return self._pins.max_blocks

    @property
    def seconds_until_pins_expire(self) -> float:
        """No pin expires for this long; infinite if none ever does."""
        return self._pins.seconds_until_expiry

    @property
    def version(self) -> int:
        """Changes whenever `match` may answer otherwise than before: while it is the same, `match` need not be repeated."""
        return self._tree.version

    @property
    def stats(self) -> CacheStats:
        """A copy of the counters."""
        return replace(self._stats)

    def now(self) -> float:
        """The cache's clock, in seconds."""
        return self._clock()

    def match(self, tokens: TokenIds, namespace: str = "") -> int:
        """Length of the longest cached prefix of ``tokens``, in tokens. Changes nothing; it does not count as a use.

        Raises:
            InvalidArgumentError: ``tokens`` are not token ids, or ``namespace`` is not a string.
        """
        check_namespace(namespace)
        match = self._tree.match(encode(tokens), namespace)
        return 0 if match is None else match.num_tokens

    def demand(self, tokens: TokenIds, namespace: str = "", read: bool = True) -> Demand:
        """What a sequence of this prompt would take if it were opened now, and its slots reserved. Changes nothing.

        Raises:
            InvalidArgumentError: ``tokens`` are not token ids, or there are none, or ``namespace`` is not a string.
        """
        check_namespace(namespace)
        prompt = encode_prompt(tokens)
        num_blocks = -(-len(prompt) // (self.block_size * TOKEN_BYTES))
        self._pins.release_expired()
        match = self._tree.match(prompt[:-TOKEN_BYTES], namespace) if read else None
        if match is None:
            return Demand(0, num_blocks)
        num_whole = match.num_whole_tokens // self.block_size
        return Demand(match.num_tokens, num_blocks - num_whole + match.num_evictable_blocks)

    def cached_blocks(self, tokens: TokenIds, namespace: str = "") -> BlockIds:
        """The physical blocks of the longest cached prefix's whole blocks, int32, until the cache changes.

        If all of the tokens are cached, and end inside a block, that block is included.

        Raises:
            InvalidArgumentError: ``tokens`` are not token ids, or ``namespace`` is not a string.
        """
        check_namespace(namespace)
        prefix = encode(tokens)
        match = self._tree.match(prefix, namespace)
        if match is None:
            return np.empty(0, dtype=np.int32)
        ids = match.path_blocks()
        if match.num_partial_tokens and match.num_tokens * TOKEN_BYTES == len(prefix):
            ids = np.append(ids, np.int32(match.partial_block))
        return ids

    def continuation(self, table: BlockTable, tokens: TokenIds, max_tokens: int) -> list[int]:
        """A cached continuation of a live sequence. Changes nothing.

        Where several are cached, the most used child is followed at each branch: of the first 8 in the order of their bytes,
        so that a step costs the same however many there are.

        Args:
            tokens: all of the sequence's tokens; the last of them need not be in the table yet.
            max_tokens: length of the answer at most.

        Raises:
            InvalidArgumentError: ``tokens`` are not token ids, or ``max_tokens`` is not a whole number of at least 0.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        max_tokens = check_count("max_tokens", max_tokens, 0)
        node = table.node
        start = 0 if node is None else (node.depth + node.num_blocks) * self.block_size
        tail = encode(tokens, start)
        return [] if node is None else continuation(node, tail, max_tokens)

    def explain(
        self, tokens: TokenIds, namespace: str = "", read: bool = True, look_elsewhere: bool = True
    ) -> Explanation:
        """What `open` would reuse of a prompt, and for all other tokens why they have to be computed. Changes nothing.

        Args:
            look_elsewhere: report that tokens are cached in another namespace, though not in which. False for callers that
                must not learn even that: to them these tokens are new.

        Raises:
            InvalidArgumentError: no tokens, or not token ids; ``namespace`` is not a string.
        """
        check_namespace(namespace)
        prompt = encode_prompt(tokens)
        return explain(self._tree, self._store.evicted, prompt, namespace, read, look_elsewhere, self._clock())

    def check(self) -> None:
        """Verify every invariant of the cache.

        Raises:
            InvariantViolation: naming what is broken.
        """
        check_cache(self._store, self._tables)

    def ref_counts(self) -> NDArray[np.int32]:
        """Owners of each block: live sequences and pins, and one more where the tree has it."""
        self._pins.release_expired()
        counts = self._pool.ref_counts.copy()
        for node in self._tree.nodes():
            counts[node.block_ids()] += node.lock_count
        return counts

    def tree_snapshot(self) -> dict[str, NodeSnapshot]:
        """The tree of each namespace as plain data, for drawings and inspection."""
        self._pins.release_expired()
        return {namespace: snapshot(root) for namespace, root in self._tree.roots.items()}

    def outline(self, namespace: str, max_nodes: int = 100) -> NodeOutline | None:
        """The root of a namespace and the ``max_nodes`` nodes that were used last, in bounded time; None: it is empty.

        Raises:
            InvalidArgumentError: ``namespace`` is not a string, or ``max_nodes`` not a whole number of at least 0.
        """
        check_namespace(namespace)
        max_nodes = check_count("max_nodes", max_nodes, 0)
        self._pins.release_expired()
        root = self._tree.roots.get(namespace)
        return None if root is None else outline(root, max_nodes)

    def block_hashes(self) -> NDArray[np.uint64]:
        """The hashes of all whole blocks that are cached, in no order (see `radixkv.cache.block_hash`)."""
        hashes = [
            np.frombuffer(node.block_hashes(), dtype=np.uint64)[: node.num_tokens // self.block_size]
            for node in self._tree.nodes()
            if node.num_blocks
        ]
        return np.concatenate([np.empty(0, dtype=np.uint64), *hashes])

    def _check_open(self, table: BlockTable) -> None:
        if not isinstance(table, BlockTable):
            raise InvalidArgumentError(f"table: expected a BlockTable, got {type(table).__name__}")
        if table not in self._tables:
            raise ClosedError("table: it is closed" if table.closed else "table: it belongs to another cache")
