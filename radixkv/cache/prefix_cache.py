"""The public interface of the cache: open a sequence on the cached prefix of its prompt, grow it, fork it, close it.

::

    table = cache.open(prompt)                       # holds the longest cached prefix
    cache.reserve(table, len(prompt))                # blocks for the rest: evicts and copies on write as needed
    ...                                              # carry out cache.drain_copies(), then write keys and values
    cache.append(table, prompt[table.num_tokens:])   # they are written: whole blocks are published
    cache.close(table)                               # all of it stays cached until it is evicted

The cache handles only token ids and block ids. The contents of the blocks are the caller's: it carries out the queued block
copies, in order, before it writes anything else.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from radixkv.cache.arguments import check_clock, check_count, check_namespace, check_retention
from radixkv.cache.block_pool import BlockPool
from radixkv.cache.block_store import BlockCopy, BlockStore
from radixkv.cache.block_table import BlockTable
from radixkv.cache.cache_control import CacheControl
from radixkv.cache.errors import InvalidArgumentError
from radixkv.cache.event_recorder import EventRecorder
from radixkv.cache.events import EventLog
from radixkv.cache.evicted import EvictedPrefixes
from radixkv.cache.eviction import LRU, ClockedPolicy, EvictionPolicy, LearningPolicy
from radixkv.cache.match import Match
from radixkv.cache.observer import TreeObserver, check_observer
from radixkv.cache.pin import Pins
from radixkv.cache.radix_tree import RadixTree
from radixkv.cache.tokens import TOKEN_BYTES, TokenIds, encode, encode_prompt


class PrefixCache(CacheControl):
    """Shares the blocks of common prefixes between sequences.

    `CacheView` has the queries, `CacheControl` pins, limits and clearing. There is no lock: only one thread may call it at a
    time, for queries too.

    Args:
        num_blocks: physical blocks, with ids from 0 on.
        block_size: tokens per block.
        policy: which leaf is evicted first, an object of this cache's own; by default the least recently used. A class with
            ``__slots__`` needs ``__weakref__`` among them.
        max_pinned_blocks: how many blocks may be pinned; by default half of them.
        remembered_blocks: how many evicted blocks are remembered by their hashes, for `explain`; by default none, and four
            times ``num_blocks`` under a policy that learns from them. It makes evicting a leaf about 5 us slower.
        events: where changes of the cache's contents are recorded, from the beginning on.
        splits_blocks: whether the first tokens of a block may be reused without the rest, as keys and values may. Where a
            block holds a state that all of its tokens have changed, they may not: then a cached prefix ends with a whole
            block, or with all tokens of a partly filled one.
        observers: are notified of changes of the tree as they happen; subclasses of `radixkv.cache.observer.TreeObserver`.
        clock: seconds since any moment; must never go back.

    Raises:
        InvalidArgumentError: a size is not a whole number, or out of its range; ``policy`` is not a policy, but its name or
            class, or another cache's, ``events`` is not an EventLog, or ``clock`` cannot be called.
        MemoryError: the blocks' counts do not fit into memory.
    """

    # The policies that caches use, by id, because a policy need not be hashable.
    _policies: ClassVar[WeakValueDictionary[int, EvictionPolicy]] = WeakValueDictionary()

    def __init__(
        self,
        num_blocks: int,
        block_size: int = 16,
        policy: EvictionPolicy | None = None,
        *,
        max_pinned_blocks: int | None = None,
        remembered_blocks: int | None = None,
        splits_blocks: bool = True,
        events: EventLog | None = None,
        observers: Sequence[TreeObserver] = (),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        block_size = check_count("block_size", block_size, 1)
        pool = BlockPool(num_blocks)
        if policy is not None:
            self._check_policy(policy)
        if not isinstance(events, EventLog | None):
            raise InvalidArgumentError(f"events: expected an EventLog, got {events!r:.80}")
        if not isinstance(observers, Sequence):
            raise InvalidArgumentError(f"observers: expected a sequence of TreeObservers, got {observers!r:.80}")
        for number, observer in enumerate(observers):
            check_observer(f"observers[{number}]", observer)
        check_clock(clock)
        learner = policy if isinstance(policy, LearningPolicy) else None
        if max_pinned_blocks is None:
            max_pinned_blocks = pool.num_blocks // 2
        if remembered_blocks is None:
            remembered_blocks = 0 if learner is None else 4 * pool.num_blocks
        max_pinned_blocks = check_count("max_pinned_blocks", max_pinned_blocks, 0)
        remembered_blocks = check_count("remembered_blocks", remembered_blocks, 0)
        self.events = events
        if isinstance(policy, ClockedPolicy):
            policy.use_clock(clock)
        notified: list[TreeObserver] = []
        evicted = None
        if remembered_blocks:
            evicted = EvictedPrefixes(remembered_blocks, block_size, clock, learner)
            notified.append(evicted)
        if events is not None:
            notified.append(EventRecorder(events))
        notified += observers
        tree = RadixTree(pool, block_size, LRU() if policy is None else policy, clock, notified, splits_blocks)
        store = BlockStore(pool, tree, Pins(tree, max_pinned_blocks, clock), block_size, evicted)
        super().__init__(store, clock)
        if policy is not None:
            self._policies[id(policy)] = policy  # it indexes the leaves of one tree only

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        policy = self._tree.policy
        self._policies[id(policy)] = policy

    def open(
        self,
        tokens: TokenIds,
        namespace: str = "",
        read: bool = True,
        write: bool = True,
        priority: int = 0,
        owner: str = "",
    ) -> BlockTable:
        """Begin a sequence whose prompt is ``tokens``: its table already holds the longest cached prefix.

        At least one token is left to compute, for its logits. Whole blocks are shared; where the prefix ends inside a
        block, the matched part of that block is queued to be copied into a block of the sequence's own.

        Args:
            namespace: only sequences with the same namespace share blocks.
            read: reuse what is cached.
            write: publish what the sequence computes.
            priority: retention priority of all that the sequence uses and computes: blocks of a HIGHER number are kept
                LONGER (under `PriorityTTL`; other policies ignore it). Scheduling priorities mostly count the other way,
                the lowest number being the most urgent: pass their negative here.
            owner: on whose behalf; what the sequence computes counts towards the owner's limit (`limit_owners`).

        Raises:
            InvalidArgumentError: no tokens, or not token ids; ``priority`` is not a whole number, or ``owner`` not a string.
            OutOfBlocks: no block is available to copy into.
        """
        check_namespace(namespace)
        prompt = encode_prompt(tokens)
        check_retention(priority, owner)
        num_prompt_tokens = len(prompt) // TOKEN_BYTES
        longest = self._tree.longest_prefix(prompt[:-TOKEN_BYTES], namespace) if read else None
        match = self._tree.reusable(longest)
        if match is not None and match.num_partial_tokens:
            # Locking the match cannot take the last evictable block away: the one to copy from is not locked with it.
            self._store.require(1)
        table = BlockTable(self._store, namespace, num_prompt_tokens, write, priority, owner)
        self._begin(table, match, prompt)
        if longest is not None:
            table.num_known_tokens = longest.num_tokens
        stats = self._stats
        stats.opened_tables += 1
        stats.queried_tokens += num_prompt_tokens
        stats.reused_tokens += table.num_cached_tokens
        return table

    def open_fill(self, tokens: TokenIds, namespace: str = "", priority: int = 0, owner: str = "") -> BlockTable:
        """Begin to fill in a prefix whose keys and values come from elsewhere; no sequence runs, and none is counted.

        The table holds the whole blocks of ``tokens`` that are cached. The rest is as for a sequence: `reserve`, write the
        blocks, `append` to publish them, `close` to end. Blocks with low ids are preferred, so that
        their memory can be prepared beforehand. The arguments are as for `open`.

        Raises:
            InvalidArgumentError: no tokens, or not token ids; ``priority`` is not a whole number, or ``owner`` not a string.
        """
        check_namespace(namespace)
        prefix = encode_prompt(tokens)
        check_retention(priority, owner)
        match = self._tree.match(prefix, namespace)
        if match is not None:
            match = Match(match.num_whole_tokens, match.node, match.num_node_blocks)
        num_cached = 0 if match is None else match.num_tokens
        table = BlockTable(self._store, namespace, num_cached, True, priority, owner, low=True)
        self._begin(table, match, prefix)
        return table

    def require(self, num_blocks: int) -> None:
        """Check that ``num_blocks`` blocks are available, if need be after releasing expired pins.

        Raises:
            InvalidArgumentError: ``num_blocks`` is not a whole number of at least 0.
            OutOfBlocks: fewer are free or evictable.
        """
        self._store.require(check_count("num_blocks", num_blocks, 0))

    def reserve(self, table: BlockTable, num_tokens: int) -> None:
        """Make the slots of positions ``table.num_tokens .. num_tokens`` the table's own and writable.

        Raises:
            InvalidArgumentError: ``num_tokens`` is not a whole number of at least 0.
            OutOfBlocks: not enough blocks are available; nothing is changed.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        num_tokens = check_count("num_tokens", num_tokens, 0)
        if num_tokens > table.num_writable:
            table.reserve(num_tokens)

    def reserve_many(self, tables: Sequence[BlockTable], num_tokens: Sequence[int]) -> None:
        """`reserve` for each of these distinct tables, all or none: what a decoding batch does every step.

        Between block boundaries it costs one comparison per table.

        Raises:
            InvalidArgumentError: these are not distinct tables, or not a whole number of at least 0 for each.
            OutOfBlocks: not enough blocks are available for all; nothing is changed.
            ClosedError: a table is closed or of another cache.
        """
        for name, given in (("tables", tables), ("num_tokens", num_tokens)):
            if not hasattr(given, "__len__"):
                raise InvalidArgumentError(f"{name}: expected a sequence, got {given!r:.80}")
        if len(tables) != len(num_tokens):
            raise InvalidArgumentError(f"num_tokens: expected {len(tables)}, one per table, got {len(num_tokens)}")
        try:
            distinct = {*tables}
        except TypeError as error:  # something in it cannot be hashed, as tables can
            raise InvalidArgumentError(f"tables: expected BlockTables, got {tables!r:.80}") from error
        if not distinct <= self._tables:
            for table in tables:
                self._check_open(table)
        if len(distinct) < len(tables):
            raise InvalidArgumentError("tables: expected distinct tables, got one twice")
        if not {*map(type, num_tokens)} <= {int}:  # numpy integers, or no integers
            num_tokens = [check_count("num_tokens", total, 0) for total in num_tokens]
        pairs = zip(tables, num_tokens, strict=True)
        short = [(table, total) for table, total in pairs if not 0 <= total <= table.num_writable]
        if short:
            check_count("num_tokens", min(total for _, total in short), 0)
            BlockTable.reserve_all(self._store, short)

    def trim(self, table: BlockTable, num_tokens: int) -> None:
        """Give back the blocks that were reserved beyond the first ``num_tokens`` positions and hold no tokens.

        Raises:
            InvalidArgumentError: ``num_tokens`` is not a whole number of at least 0.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        table.trim(check_count("num_tokens", num_tokens, 0))

    def append(self, table: BlockTable, tokens: TokenIds) -> None:
        """Record that the next tokens' keys and values have been written, and publish the blocks that are whole.

        Where the tree holds such a block already, the table is pointed at the tree's and its own is freed.

        Raises:
            InvalidArgumentError: not token ids, or more than `reserve` made writable.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        table.append(encode(tokens))

    def fork(self, table: BlockTable, count: int = 1) -> list[BlockTable]:
        """``count`` more sequences that go on from where ``table`` is. They share all of its blocks; none is allocated.

        Raises:
            InvalidArgumentError: ``count`` is not a whole number of at least 1.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        children = table.fork(check_count("count", count, 1))
        self._tables.update(children)
        self._stats.forked_tables += count
        return children

    def branch(self, table: BlockTable) -> None:
        """Keep a sequence's partly filled last block as it is now, and let the sequence go on in a copy of it.

        For blocks that cannot be split (``splits_blocks``), where prompts part inside one: the others begin with the block
        that was kept, which stays beside fuller ones until it is evicted. Nothing happens where blocks can be split, the last
        one is whole or shared with forks, or the table does not publish.

        Raises:
            OutOfBlocks: no block is available to copy into; nothing is changed.
            ClosedError: the table is closed or of another cache.
        """
        self._check_open(table)
        if not self._tree.splits_blocks:
            self._store.require(1)
            table.branch()

    def close(self, table: BlockTable) -> None:
        """End a sequence: all of it, its partly filled last block included, stays cached; its blocks become evictable.

        A partly filled block that a live fork still shares is left to the fork: it stays cached if that is closed, and is
        lost if that is aborted.

        Raises:
            ClosedError: the table is closed already, or of another cache.
        """
        self._check_open(table)
        self._tables.remove(table)
        table.close()

    def abort(self, table: BlockTable) -> None:
        """End a sequence without publishing anything more of it.

        Raises:
            ClosedError: the table is closed already, or of another cache.
        """
        self._check_open(table)
        self._tables.remove(table)
        table.abort()

    def drain_copies(self) -> list[BlockCopy]:
        """The block copies queued since the last call, to be carried out in this order before any other write.

        The order matters: a later copy may read what an earlier one wrote, and a source that is free by now, or the target of
        a later copy, is still read in time.
        """
        return self._store.drain_copies()

    def _check_policy(self, policy: EvictionPolicy) -> None:
        if isinstance(policy, type) or not isinstance(policy, EvictionPolicy):
            raise InvalidArgumentError(f"policy: expected an eviction policy such as LRU(), got {policy!r:.80}")
        if not hasattr(policy, "__weakref__"):
            raise InvalidArgumentError(
                f"policy: expected one with __weakref__ among its __slots__, got {type(policy).__name__}"
            )
        if id(policy) in self._policies:
            raise InvalidArgumentError("policy: expected one for each cache, got one that is another cache's")

    def _begin(self, table: BlockTable, match: Match | None, tokens: bytes) -> None:
        """Begin a new table on the match of its tokens; None: nothing of them is cached."""
        if match is None:
            match = Match(0, self._tree.root(table.namespace), 0)
        table.begin(match, tokens)
        self._tables.add(table)
