"""One sequence's map from token positions to physical blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from radixkv.cache.block_pool import BlockIds
from radixkv.cache.block_store import BlockStore
from radixkv.cache.errors import InvalidArgumentError, InvariantViolation
from radixkv.cache.match import Match
from radixkv.cache.node import Node
from radixkv.cache.tokens import TOKEN_BYTES, decode


class BlockTable:
    """The blocks of one live sequence.

    Made by `PrefixCache.open` and `PrefixCache.fork`. Only the cache calls the methods that change it, and checks their
    arguments; everything else only reads it::

        block_ids    [ the tree's | the table's own: a partly filled tail, then reserved blocks ]
                                  ^ num_published

    The table holds the tree's blocks through a lock on the node that ends with them; the pool counts it as an owner of each
    of the others.

    Attributes:
        namespace: it shares prefixes within this namespace only.
        num_prompt_tokens: length of the prompt that it was opened with.
        priority: retention priority of what it computes and uses (`PrefixCache.open`).
        owner: what it computes counts towards this owner's limit (`PrefixCache.limit_owners`).
        publishes: what it computes is published; not any more once the cache was cleared under it.
        num_cached_tokens: how many of its prompt's tokens were cached, and are in its blocks from the start.
        num_known_tokens: how many of them were cached, reusable or not: more only where blocks cannot be split.
        num_unaccounted_tokens: how many of them were neither reused nor computed yet.
        num_tokens: tokens whose keys and values are in the blocks.
        num_blocks: length of ``block_ids``.
        node: the node of the tree that it has locked; None once the cache was cleared under it.
        num_writable: positions below this, from ``num_tokens`` on, are reserved: their blocks have no other owner. Never less
            than ``num_tokens``.
        version: incremented when the block of an already reserved position changes (by copy-on-write, because another
            sequence published the same tokens first, or because it was given back), as a sign that anything derived from
            ``block_ids`` is out of date.
        closed: its blocks are released, and it can no longer be used.
    """

    __slots__ = (
        "_ids",
        "_low",
        "_num_published",
        "_past",
        "_prompt",
        "_store",
        "_tail",
        "closed",
        "namespace",
        "node",
        "num_blocks",
        "num_cached_tokens",
        "num_known_tokens",
        "num_prompt_tokens",
        "num_tokens",
        "num_unaccounted_tokens",
        "num_writable",
        "owner",
        "priority",
        "publishes",
        "version",
    )

    def __init__(
        self,
        store: BlockStore,
        namespace: str,
        num_prompt_tokens: int,
        write: bool,
        priority: int,
        owner: str,
        *,
        low: bool = False,
    ) -> None:
        self.namespace = namespace
        self.owner = owner
        self.priority = priority
        self.publishes = write
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = self.num_known_tokens = self.num_unaccounted_tokens = 0
        self.num_tokens = self.num_writable = 0
        self.num_blocks = 0
        self.node: Node | None = None
        self.version = 0
        self.closed = False
        self._store = store
        self._ids: BlockIds = np.empty(0, dtype=np.int32)  # the first num_blocks are used
        self._tail = bytearray()  # tokens of the own blocks, encoded
        self._num_published = 0
        self._past: Sequence[tuple[int, int]] = ()  # `EvictedPrefixes.recall`
        self._prompt = b""  # until blocks of it that were evicted are recalled
        self._low = low  # `BlockPool.allocate`

    @property
    def block_ids(self) -> BlockIds:
        """The physical block of each ``block_size`` positions, reserved ones included; a read-only view, int32."""
        return _read_only(self._ids[: self.num_blocks])

    @property
    def own_block_ids(self) -> BlockIds:
        """Those of ``block_ids`` that are not the tree's; a read-only view, int32."""
        return _read_only(self._ids[self._num_published : self.num_blocks])

    @property
    def tokens(self) -> NDArray[np.int32]:
        """The ids of the ``num_tokens`` tokens, a copy."""
        return decode(self._encoded_tokens())

    # -- called by the cache -------------------------------------------------------------------------------------

    def begin(self, match: Match, prompt: bytes) -> None:
        """Share the whole blocks of a matched prefix of ``prompt``, and copy the matched part of the next.

        If there is such a part, the caller has checked with `BlockStore.require` that a block to copy it into is available.
        """
        store = self._store
        num_tokens = match.num_tokens
        if self.publishes and match.ends_node:  # elsewhere other blocks have replaced those that were evicted
            self._prompt = prompt
        self._ids = match.path_blocks()
        self.num_blocks = self._num_published = len(self._ids)
        self.node = store.tree.lock(match)
        if match.num_partial_tokens:
            if match.node.is_branch_point:
                store.tree.use_first_block(match.node, self.priority)
            own = store.allocate_one(self._last_block())
            store.queue_copy(match.partial_block, own, match.num_partial_tokens)
            self._add_block(own)
            self._tail += prompt[match.num_whole_tokens * TOKEN_BYTES : num_tokens * TOKEN_BYTES]
        self.num_tokens = self.num_writable = self.num_cached_tokens = self.num_known_tokens = num_tokens
        self.num_unaccounted_tokens = self.num_prompt_tokens - num_tokens

    def reserve(self, num_tokens: int) -> None:
        """Make the positions below ``num_tokens`` writable: `PrefixCache.reserve`."""
        num_new = self._num_missing_blocks(num_tokens)
        copies_tail = self._shares_tail()
        self._store.require(num_new + copies_tail)
        self._grow(num_new, copies_tail)

    @staticmethod
    def reserve_all(store: BlockStore, requests: Sequence[tuple[BlockTable, int]]) -> None:
        """`reserve` for several distinct tables of one store: `PrefixCache.reserve_many`."""
        size = store.block_size
        needed = sum(table._num_missing_blocks(total) for table, total in requests)
        sharers = Counter(int(table._ids[table.num_tokens // size]) for table, _ in requests if table._shares_tail())
        # The last owner of a shared tail to write into it need not copy it.
        needed += sum(min(count, int(store.pool.ref_counts[tail]) - 1) for tail, count in sharers.items())
        store.require(needed)
        for table, total in requests:
            table._grow(table._num_missing_blocks(total), table._shares_tail())

    def trim(self, num_tokens: int) -> None:
        """Give back reserved blocks beyond those that hold ``num_tokens``: `PrefixCache.trim`."""
        store = self._store
        num_blocks = -(-max(num_tokens, self.num_tokens) // store.block_size)
        if num_blocks >= self.num_blocks:
            return
        store.pool.release(self._ids[num_blocks : self.num_blocks].copy())
        self.num_blocks = num_blocks
        self.num_writable = min(self.num_writable, num_blocks * store.block_size)
        self.version += 1

    def append(self, tokens: bytes) -> None:
        """Count encoded tokens as written, and publish the blocks that they fill: `PrefixCache.append`."""
        store, count = self._store, len(tokens) // TOKEN_BYTES
        num_tokens = self.num_tokens + count
        if num_tokens > self.num_writable and count:
            raise InvalidArgumentError(
                f"tokens: {count} after {self.num_tokens}, but only {self.num_writable} positions are reserved"
            )
        self._tail += tokens
        self.num_tokens = num_tokens
        if self.num_unaccounted_tokens:
            computed = min(count, self.num_unaccounted_tokens)
            self.num_unaccounted_tokens -= computed
            store.stats.computed_tokens += computed
        if self.publishes and num_tokens // store.block_size > self._num_published:
            self._publish()

    def fork(self, count: int) -> list[BlockTable]:
        """``count`` more tables that share all blocks with tokens in them: `PrefixCache.fork`."""
        store = self._store
        filled = self._ids[: -(-self.num_tokens // store.block_size)]
        children = []
        for _ in range(count):
            child = BlockTable(store, self.namespace, self.num_prompt_tokens, self.publishes, self.priority, self.owner)
            child.num_cached_tokens, child.num_known_tokens = self.num_cached_tokens, self.num_known_tokens
            child._ids = filled.copy()
            child.num_blocks = len(filled)
            child._tail += self._tail
            child.num_tokens = child.num_writable = self.num_tokens
            child._num_published = self._num_published
            child.node = self.node
            children.append(child)
        store.pool.share(filled[self._num_published :], count)
        # The tail block has several owners now: the next to write into it must copy it.
        self.num_writable = self.num_tokens
        if self.node is not None:
            store.tree.lock_again(self.node, count)
        return children

    def branch(self) -> None:
        """Publish a partly filled last block, and go on in a copy, for which a block is available: `PrefixCache.branch`."""
        is_partly_filled = self.num_tokens % self._store.block_size > 0
        if is_partly_filled and self.publishes and self.node is not None and not self._shares_tail():
            (ending,) = self.fork(1)
            self._grow(0, copies_tail=True)
            ending.close(is_branch_point=True)

    def close(self, is_branch_point: bool = False) -> None:
        """Publish a partly filled last block, then `abort`."""
        store = self._store
        if self.num_tokens % store.block_size and self.publishes and self.node is not None:
            last = self.num_tokens // store.block_size
            tail = int(self._ids[last])
            # A tail that a live fork still holds stays the fork's to publish: evicting it would free nothing.
            if store.pool.ref_counts[tail] == 1 and store.tree.publish_partial(
                self.node, self._tail, tail, self.priority, self.owner, is_branch_point
            ):
                self._num_published = last + 1
        self.abort()

    def abort(self) -> None:
        """Release all blocks."""
        store = self._store
        self.closed = True
        store.stats.abandoned_tokens += self.num_unaccounted_tokens
        if self._num_published < self.num_blocks:
            store.pool.release(self.own_block_ids)
        if self.node is not None:
            store.tree.unlock(self.node, self.priority)
            self.node = None

    def detach(self) -> None:
        """Become an owner of the tree's blocks that it uses, and publish nothing more: the tree is about to be cleared."""
        self._store.pool.share(self._ids[: self._num_published])
        self._tail = bytearray(self._encoded_tokens())
        self.node, self.publishes, self._num_published, self._prompt = None, False, 0, b""

    def check(self) -> None:
        """Raise InvariantViolation unless its tokens and blocks agree with its counts and with its node."""
        if self.closed or len(self._encoded_tokens()) != self.num_tokens * TOKEN_BYTES:
            raise InvariantViolation("a closed table is still live, or a table's tokens are not those it counts")
        if self.num_tokens > self.num_blocks * self._store.block_size:
            raise InvariantViolation(f"a table of {self.num_blocks} blocks has {self.num_tokens} tokens")
        path = [] if self.node is None else [node.block_ids() for node in self.node.path()]
        blocks = np.concatenate([*reversed(path), np.empty(0, dtype=np.int32)])
        if len(blocks) != self._num_published or not np.array_equal(blocks, self.block_ids[: len(blocks)]):
            raise InvariantViolation("a table's published blocks are not those of the node it has locked")

    # -- internals -----------------------------------------------------------------------------------------------

    def _encoded_tokens(self) -> bytes:
        path = [] if self.node is None else [node.tokens for node in self.node.path()]
        return b"".join([*reversed(path), self._tail])

    def _num_missing_blocks(self, num_tokens: int) -> int:
        """How many more blocks the table needs for so many tokens."""
        return max(0, -(-num_tokens // self._store.block_size) - self.num_blocks)

    def _shares_tail(self) -> bool:
        """Whether forks that begin in the partly filled tail block, the only one that may have other owners, own it too."""
        store = self._store
        tail = self.num_tokens // store.block_size
        return tail < self.num_blocks and bool(store.pool.ref_counts[self._ids[tail]] > 1)

    def _grow(self, num_new: int, copies_tail: bool) -> None:
        """Add ``num_new`` blocks, and replace a shared tail by a copy; the blocks are available."""
        store = self._store
        if self._prompt:
            self._recall()
        if num_new == 1 and not copies_tail and not self._low:
            self._add_block(store.allocate_one(self._last_block()))
        elif num_new or copies_tail:
            # Allocated all at once, before the table changes.
            tail = self.num_tokens // store.block_size
            before = (int(self._ids[tail - 1]) if tail else None) if copies_tail else self._last_block()
            blocks = store.allocate(num_new + copies_tail, before, low=self._low)
            if copies_tail:
                shared = self._ids[tail : tail + 1].copy()
                store.queue_copy(int(shared[0]), int(blocks[0]), self.num_tokens % store.block_size)
                self._ids[tail] = blocks[0]
                self.version += 1
                store.pool.release(shared)
            self._add_blocks(blocks[int(copies_tail) :])
        self.num_writable = self.num_blocks * store.block_size

    def _recall(self) -> None:
        """Learn how often what is about to be computed was used before it was evicted.

        Not before blocks are reserved for it: a sequence for which there are none ends, and begins anew later.
        """
        prompt, self._prompt = self._prompt, b""
        if self._store.evicted is not None and self.node is not None:
            self._past = self._store.evicted.recall(self.node, prompt, self._num_published)

    def _publish(self) -> None:
        """Publish all whole blocks that are not published yet."""
        stop = self.num_tokens // self._store.block_size
        # Blocks that were cached before become separate nodes, by how often they were used then: see `RadixTree.publish`.
        for past_stop, past_uses in self._past:
            if self._num_published < past_stop and self._num_published < stop:
                self._publish_blocks(min(stop, past_stop), past_uses)
        if self._num_published < stop:
            self._publish_blocks(stop, 0)

    def _publish_blocks(self, stop: int, past_uses: int) -> None:
        assert self.node is not None
        store, start = self._store, self._num_published
        own = self._ids[start:stop]
        num_bytes = (stop - start) * store.block_size * TOKEN_BYTES
        tokens, self._tail = self._tail, self._tail[num_bytes:]
        del tokens[num_bytes:]
        self.node, kept = store.tree.publish(self.node, tokens, own, self.priority, past_uses, self.owner)
        self._num_published = stop
        if kept is own:
            return
        duplicates = own[kept != own]
        self._ids[start:stop] = kept
        self.version += 1
        store.pool.release(duplicates)
        store.stats.deduplicated_blocks += len(duplicates)

    def _last_block(self) -> int | None:
        return int(self._ids[self.num_blocks - 1]) if self.num_blocks else None

    def _add_block(self, block: int) -> None:
        if self.num_blocks == len(self._ids):
            self._grow_capacity(self.num_blocks + 1)
        self._ids[self.num_blocks] = block
        self.num_blocks += 1

    def _add_blocks(self, blocks: BlockIds) -> None:
        total = self.num_blocks + len(blocks)
        if total > len(self._ids):
            self._grow_capacity(total)
        self._ids[self.num_blocks : total] = blocks
        self.num_blocks = total

    def _grow_capacity(self, least: int) -> None:
        # Doubling: a sequence that grows by one block at a time must not copy its table each time.
        grown = np.empty(max(least, 2 * len(self._ids)), dtype=np.int32)
        grown[: self.num_blocks] = self._ids[: self.num_blocks]
        self._ids = grown


def _read_only(view: BlockIds) -> BlockIds:
    view.setflags(write=False)
    return view
