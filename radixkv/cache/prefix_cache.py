"""The face of the cache: open a sequence on what is known of its prompt, grow it, fork it, close it.

::

    table = cache.open(prompt)                  # holds the longest known prefix
    cache.reserve(table, len(prompt))           # slots for the rest: evicts and copies on write as needed
    ...                                         # carry out cache.drain_copies(), then write keys and values
    cache.append(table, prompt[table.num_tokens:])   # they are written: whole blocks become known to everybody
    cache.close(table)                          # all of it stays known until it is evicted

The cache deals in token ids and block ids only. What is in the blocks is the caller's: it carries out the queued block
copies, in order, before it writes anything else.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_supply import BlockCopy, BlockSupply
from radixkv.cache.block_table import BlockTable
from radixkv.cache.errors import ClosedError, InvalidArgumentError, OutOfBlocks
from radixkv.cache.events import AllCleared, EventLog
from radixkv.cache.evicted import EvictedPrefixes
from radixkv.cache.eviction import LRU, EvictionPolicy, LearningPolicy
from radixkv.cache.explain import Explanation, explain
from radixkv.cache.invariants import check_cache
from radixkv.cache.node import Match
from radixkv.cache.outline import NodeOutline, outline
from radixkv.cache.pin import Pin, Pins
from radixkv.cache.publisher import Publisher
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.snapshot import NodeSnapshot, snapshot
from radixkv.cache.stats import CacheStats
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, encode


class PrefixCache:
    """Shares the blocks of common prefixes between sequences.

    Args:
        num_blocks: physical blocks, with ids from 0 on.
        block_size: tokens a block.
        policy: which leaf goes first when blocks are needed; by default the least recently used.
        max_pinned_blocks: how many blocks may be pinned; by default half of them.
        remembered_blocks: how many evicted blocks are remembered by their hashes, for `explain`; by default none, and four
            times ``num_blocks`` under a policy that learns from them. It makes evicting a leaf about 5 us slower.
        events: where it is told what becomes known and what goes, from the beginning on.
        clock: seconds, from any beginning on; never goes back.

    Raises:
        InvalidArgumentError: a size is not a whole number, or is below its least value.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        *,
        max_pinned_blocks: int | None = None,
        remembered_blocks: int | None = None,
        events: EventLog | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        _check_count("num_blocks", num_blocks, 1)
        _check_count("block_size", block_size, 1)
        if max_pinned_blocks is None:
            max_pinned_blocks = num_blocks // 2
        if remembered_blocks is None:
            remembered_blocks = 4 * num_blocks if isinstance(policy, LearningPolicy) else 0
        _check_count("max_pinned_blocks", max_pinned_blocks, 0)
        _check_count("remembered_blocks", remembered_blocks, 0)
        self.block_size = block_size
        self._clock = clock
        self._pool = BlockPool(num_blocks)
        self._evicted = EvictedPrefixes(remembered_blocks, block_size) if remembered_blocks else None
        self.events = events
        self._tree = RadixTree(
            self._pool, block_size, LRU() if policy is None else policy, clock, self._evicted, events
        )
        self._learns = isinstance(policy, LearningPolicy)
        self._tables: set[BlockTable] = set()
        self._pins = Pins(self._tree, max_pinned_blocks, clock)
        self._stats = CacheStats()
        self._publisher = Publisher(self._tree, self._pool, block_size, self._stats)
        self._supply = BlockSupply(self._pool, block_size, self._tree, self._pins, self._stats)

    @property
    def num_blocks(self) -> int:
        return self._pool.num_blocks

    @property
    def num_free_blocks(self) -> int:
        return self._pool.num_free

    @property
    def num_held_blocks(self) -> int:
        """Blocks with an owner: live sequences, the tree, or both."""
        return self._pool.num_blocks - self._pool.num_free

    @property
    def num_evictable_blocks(self) -> int:
        """Blocks that only the tree owns, and that eviction could free."""
        return self._tree.num_evictable_blocks

    @property
    def num_available_blocks(self) -> int:
        return self._supply.num_available

    @property
    def namespaces(self) -> tuple[str, ...]:
        """Those of which something is known or in use."""
        return tuple(self._tree.roots)

    @property
    def max_pinned_blocks(self) -> int:
        """Blocks that may be pinned together."""
        return self._pins.max_blocks

    @property
    def version(self) -> int:
        """Another number whenever `match` may answer otherwise than before: no change, no need to ask again."""
        return self._tree.version

    @property
    def stats(self) -> CacheStats:
        """A copy of the counters."""
        return replace(self._stats)

    def now(self) -> float:
        """The cache's clock, in seconds."""
        return self._clock()

    def match(self, tokens: TokenIds, namespace: str = "") -> int:
        """Length of the longest known prefix of ``tokens``, in tokens. Changes nothing, not even what was used last.

        Raises:
            InvalidArgumentError: ``tokens`` are no token ids, or ``namespace`` is no string.
        """
        self._check_namespace(namespace)
        match = self._tree.match(encode(tokens), namespace)
        return 0 if match is None else match.num_tokens

    def explain(
        self, tokens: TokenIds, namespace: str = "", read: bool = True, look_elsewhere: bool = True
    ) -> Explanation:
        """What `open` would reuse of a prompt, and for all other tokens why they have to be computed. Changes nothing.

        Args:
            namespace, read: as for `open`.
            look_elsewhere: say that a prompt is known in another namespace, though not in which. False for those who must
                not learn even that: to them it is new.

        Raises:
            InvalidArgumentError: no tokens, or not token ids; ``namespace`` is no string.
        """
        self._check_namespace(namespace)
        prompt = encode(tokens)
        if not prompt:
            raise InvalidArgumentError("tokens: expected at least one, got none")
        return explain(
            self._tree, self._evicted, prompt, namespace, read, look_elsewhere, self._clock(), self.block_size
        )

    def open(
        self, tokens: TokenIds, namespace: str = "", read: bool = True, write: bool = True, priority: int = 0
    ) -> BlockTable:
        """Begin a sequence whose prompt is ``tokens``: its table already holds the longest known prefix.

        At least one token is left to compute, for its logits. Whole blocks are shared; where the prefix ends inside a
        block, that block's known part is queued to be copied into a block of the sequence's own.

        Args:
            namespace: only sequences with the same namespace share blocks.
            read: reuse what is known.
            write: make known what the sequence computes.
            priority: of what it uses and computes, for a policy that looks at priorities (`PriorityTTL`).

        Raises:
            InvalidArgumentError: no tokens, or not token ids; ``priority`` is no whole number.
            OutOfBlocks: the block to copy into cannot be had.
        """
        self._check_namespace(namespace)
        prompt = encode(tokens)
        if not prompt:
            raise InvalidArgumentError("tokens: expected at least one, got none")
        if not isinstance(priority, int):
            raise InvalidArgumentError(f"priority: expected a whole number, got {priority!r}")
        num_prompt_tokens = len(prompt) // TOKEN_BYTES
        tree = self._tree
        match = tree.match(prompt[:-TOKEN_BYTES], namespace) if read else None
        if match is not None and match.num_partial_tokens:
            # Locking the match cannot take the last evictable block away: the one to copy from is not locked with it.
            self._supply.require(1)
        if match is None:
            match = Match(0, tree.root(namespace), 0)

        table = BlockTable(namespace, num_prompt_tokens, write, priority)
        if self._learns and self._evicted is not None and write:
            table._past = tree.recall(match, prompt)
        table._ids = tree.path_blocks(match)
        table._num_blocks = table._num_published = len(table._ids)
        table._node = tree.lock(match)
        if match.num_partial_tokens:
            try:
                own = self._supply.allocate_one(after=table._last_block())
            except OutOfBlocks:
                tree.unlock(table._node)
                raise
            self._supply.queue_copy(match.partial_block, own, match.num_partial_tokens)
            table._add_block(own)
            whole = match.num_tokens - match.num_partial_tokens
            table._tail += prompt[whole * TOKEN_BYTES : match.num_tokens * TOKEN_BYTES]
        table._num_tokens = table._num_writable = table.num_cached_tokens = match.num_tokens
        table._num_unaccounted = num_prompt_tokens - match.num_tokens
        self._tables.add(table)
        self._stats.opened_tables += 1
        self._stats.queried_tokens += num_prompt_tokens
        self._stats.reused_tokens += match.num_tokens
        return table

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Make the slots of positions ``table.num_tokens .. num_tokens`` the table's own and writable.

        Raises:
            InvalidArgumentError: ``num_tokens`` is no whole number of at least 0.
            OutOfBlocks: not all blocks can be had; nothing is changed.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        if not isinstance(num_tokens, int | np.integer) or isinstance(num_tokens, bool) or num_tokens < 0:
            raise InvalidArgumentError(f"num_tokens: expected a whole number of at least 0, got {num_tokens!r}")
        if num_tokens <= table._num_writable or num_tokens <= table._num_tokens:
            return
        copies_tail = self._supply.shares_tail(table)
        num_new = max(0, -(-num_tokens // self.block_size) - table._num_blocks)
        if num_new + copies_tail:
            self._supply.require(num_new + copies_tail)
        self._supply.grow(table, num_new, copies_tail)

    def reserve_many(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> None:
        """`reserve` for each of these distinct tables, all or none: what a decoding batch does every step.

        Between block borders it costs one comparison a table.

        Raises:
            InvalidArgumentError: a table is given twice, or ``num_tokens`` are not as many whole numbers as tables.
            OutOfBlocks: not all blocks can be had; nothing is changed.
            ClosedError: a table is closed or of another cache.
        """
        if len(tables) != len(num_tokens):
            raise InvalidArgumentError(f"num_tokens: expected {len(tables)}, one a table, got {len(num_tokens)}")
        if not self._tables.issuperset(tables):
            for table in tables:
                self._check_open(table)
        try:
            short = [
                (table, total) for table, total in zip(tables, num_tokens, strict=True) if total > table._num_writable
            ]
        except TypeError as error:
            raise InvalidArgumentError(f"num_tokens: expected whole numbers, got {num_tokens!r}") from error
        if not short:
            return
        for _, total in short:
            if not isinstance(total, int | np.integer):
                raise InvalidArgumentError(f"num_tokens: expected whole numbers, got {total!r}")
        if len({id(table) for table, _ in short}) < len(short):
            raise InvalidArgumentError("tables: expected distinct tables, got one twice")
        size = self.block_size
        needed = sum(max(0, -(-total // size) - table._num_blocks) for table, total in short)
        # Of the owners of a shared tail, the last to write need not copy it.
        sharers = Counter(
            int(table._ids[table._num_tokens // size]) for table, _ in short if self._supply.shares_tail(table)
        )
        needed += sum(min(count, int(self._pool.ref_counts[tail]) - 1) for tail, count in sharers.items())
        if needed:
            self._supply.require(needed)
        for table, total in short:
            self._supply.grow(table, max(0, -(-total // size) - table._num_blocks), self._supply.shares_tail(table))

    def append(self, table: BlockTable, tokens: TokenIds) -> None:
        """Record that the next tokens' keys and values have been written, and make whole blocks known.

        Where the tree knows such a block already, the table is pointed at the tree's and its own is freed.

        Raises:
            InvalidArgumentError: not token ids, or more than `reserve` made room for.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        data = encode(tokens)
        count = len(data) // TOKEN_BYTES
        if table._num_tokens + count > max(table._num_writable, table._num_tokens):
            raise InvalidArgumentError(
                f"tokens: {count} after {table._num_tokens}, but only {table._num_writable} positions are reserved"
            )
        table._tail += data
        table._num_tokens += count
        computed = min(count, table._num_unaccounted)
        table._num_unaccounted -= computed
        self._stats.computed_tokens += computed
        if table._write and table._num_tokens // self.block_size > table._num_published:
            self._publisher.publish(table)

    def fork(self, table: BlockTable, count: int = 1) -> list[BlockTable]:
        """``count`` more sequences that go on from where ``table`` is. They share all of its blocks; none is taken.

        Raises:
            InvalidArgumentError: ``count`` is no whole number of at least 1.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            raise InvalidArgumentError(f"count: expected a whole number of at least 1, got {count!r}")
        filled = table._ids[: -(-table._num_tokens // self.block_size)]
        children = [table._fork(filled) for _ in range(count)]
        self._pool.share(filled[table._num_published :], count)
        # The tail block has several owners now: the next to write into it must copy it.
        table._num_writable = table._num_tokens
        if table._node is not None:
            self._tree.lock_again(table._node, count)
        self._tables.update(children)
        self._stats.forked_tables += count
        return children

    def close(self, table: BlockTable) -> None:
        """End a sequence: all of it, its partly filled last block included, stays known; its blocks become evictable.

        Raises:
            ClosedError: the table is closed already, or of another cache.
        """
        self._check_open(table)
        num_partial = table._num_tokens % self.block_size
        if table._write and num_partial and table._node is not None:
            place = table._num_tokens // self.block_size
            tail = int(table._ids[place])
            # A tail that a live fork still holds stays the fork's to publish: evicting it would free nothing.
            if self._pool.ref_counts[tail] == 1 and self._tree.publish_partial(
                table._node, table._tail, tail, table.priority
            ):
                table._num_published = place + 1
        self._let_go(table)

    def abort(self, table: BlockTable) -> None:
        """End a sequence without making anything more of it known.

        Raises:
            ClosedError: the table is closed already, or of another cache.
        """
        self._check_open(table)
        self._let_go(table)

    def pin(self, tokens: TokenIds, namespace: str = "", ttl: float | None = None) -> Pin:
        """Keep the known whole blocks of a prefix from eviction, until `release`, `clear`, or ``ttl`` seconds are over.

        Raises:
            InvalidArgumentError: ``tokens`` are no token ids, ``namespace`` is no string, or ``ttl`` not above 0.
            PinQuotaExceeded: more than ``max_pinned_blocks`` would be pinned; nothing is.
        """
        self._check_namespace(namespace)
        if ttl is not None and not (isinstance(ttl, int | float) and ttl > 0):
            raise InvalidArgumentError(f"ttl: expected seconds above 0 or None, got {ttl!r}")
        match = self._tree.match(encode(tokens), namespace)
        if match is None or match.num_tokens < self.block_size:
            return Pin(namespace, 0, None, None)
        return self._pins.add(match, namespace, ttl)

    def pins(self) -> list[Pin]:
        """The pins that are in force."""
        self._pins.release_expired()
        return list(self._pins)

    def release(self, pin: Pin) -> None:
        """Let a pinned prefix be evicted again; a pin that was released, expired or cleared is left as it is.

        Raises:
            InvalidArgumentError: ``pin`` is no Pin.
            ClosedError: it belongs to another cache.
        """
        self._pins.release(pin)

    def clear(self, namespace: str | None = None) -> int:
        """Forget everything that is known, of one namespace or of all; returns how many blocks became free.

        Live sequences keep their blocks and go on, but make nothing known any more: it could depend on what was to be
        forgotten, such as old weights. Pins of what is forgotten are released, and what was evicted of it
        is no longer remembered.

        Raises:
            InvalidArgumentError: ``namespace`` is neither a string nor None.
        """
        if namespace is not None:
            self._check_namespace(namespace)
        free_before = self._pool.num_free
        if self._evicted is not None:
            self._evicted.forget(namespace)
        for name in [name for name in self._tree.roots if namespace in (None, name)]:
            for table in self._tables:
                if table.namespace == name:
                    # What the tree owned for it becomes its own.
                    self._pool.share(table._ids[: table._num_published])
                    table._tail = bytearray(table._encoded_tokens())
                    table._node, table._write, table._num_published = None, False, 0
            self._pins.forget(name)
            self._tree.remove_namespace(name, tell=namespace is not None)
        if namespace is None and self.events is not None:
            self.events.add(AllCleared())
        return self._pool.num_free - free_before

    def drain_copies(self) -> list[BlockCopy]:
        """The block copies queued since the last call, to be carried out in this order before any other write.

        In this order, because a later copy may read what an earlier one wrote. A source may be free by now, or the target
        of a later copy: it is still read in time.
        """
        return self._supply.drain_copies()

    def check(self) -> None:
        """Verify every invariant of the cache.

        Raises:
            InvariantViolation: naming what is broken.
        """
        check_cache(self._pool, self._tree, self._tables, list(self._pins), self._stats, self.block_size)

    def ref_counts(self) -> NDArray[np.int32]:
        """Owners of each block: live sequences and pins, and one more where the tree has it."""
        counts = self._pool.ref_counts.copy()
        for node in self._tree.nodes():
            counts[node.block_ids()] += node.lock_count
        return counts

    def tree_snapshot(self) -> dict[str, NodeSnapshot]:
        """The tree of each namespace as plain data, for drawings and inspection."""
        return {namespace: snapshot(root) for namespace, root in self._tree.roots.items()}

    def outline(self, namespace: str, max_nodes: int = 100) -> NodeOutline | None:
        """The root of a namespace and the ``max_nodes`` nodes that were used last, in bounded time; None: it is empty."""
        root = self._tree.roots.get(namespace)
        return None if root is None else outline(root, max_nodes)

    def _let_go(self, table: BlockTable) -> None:
        self._tables.remove(table)
        table.closed = True
        self._stats.abandoned_tokens += table._num_unaccounted
        self._pool.release(table._ids[table._num_published : table._num_blocks])
        if table._node is not None:
            self._tree.unlock(table._node, table.priority)
            table._node = None

    def _check_open(self, table: BlockTable) -> None:
        if not isinstance(table, BlockTable):
            raise InvalidArgumentError(f"table: expected a BlockTable, got {type(table).__name__}")
        if table not in self._tables:
            raise ClosedError("table: it is closed" if table.closed else "table: it belongs to another cache")

    @staticmethod
    def _check_namespace(namespace: str) -> None:
        if not isinstance(namespace, str):
            raise InvalidArgumentError(f"namespace: expected a string, got {namespace!r}")


def _check_count(name: str, value: int, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InvalidArgumentError(f"{name}: expected a whole number of at least {least}, got {value!r}")
