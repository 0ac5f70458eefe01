"""Which blocks go down from the pool into tiers, and when their bytes are read.

::

    evicted (`on_remove`) ──────────────────────┐
    reused, or published under write-through ───┤
    pinned ─────────────────────────────────────┴─> send_down(): before anything overwrites the pool, the bytes are read in
                                                    one pass and queued; a thread writes them

Eviction only lists the blocks: their bytes stay in place until the next step writes into the pool, and `send_down` runs
before that. Blocks that are not evicted wait until the queue has room for them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from radixkv.cache import BlockTable, PrefixCache
from radixkv.cache.block_hash import namespace_hash, next_hash, next_hashes
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES, decode
from radixkv.config import CacheWritePolicy
from radixkv.namespaces import namespace_group
from radixkv.tiers.block_key import is_filled_enough
from radixkv.tiers.moves.hot_prefixes import hot_prefixes
from radixkv.tiers.moves.known_blocks import KnownBlocks
from radixkv.tiers.moves.pool_rows import PoolRows
from radixkv.tiers.moves.wanted_prefixes import WantedPrefix, WantedPrefixes
from radixkv.tiers.moves.writer import BlockWriter, PrefixBlocks
from radixkv.tiers.tier import BlockBytes

_log = logging.getLogger(__name__)

# Blocks that are not evicted can wait: this many are read per step, which takes a few milliseconds of it.
_BLOCKS_PER_STEP = 32
# How long to wait for space in the queue before the time left is checked again.
_MAX_WAIT_SECONDS = 1.0
# How many wanted prefixes are looked at per step, and how much of the writer's queue their blocks may fill while the engine
# computes: evicted blocks, which cannot wait, have the rest.
_PREFIXES_PER_STEP = 8
_SHARE_DURING_STEPS = 0.5


class _Part(NamedTuple):
    """Blocks of a prefix, where in the pool they are, and their hashes."""

    blocks: PrefixBlocks
    ids: NDArray[np.int32]
    hashes: Sequence[int]

    def first(self, count: int) -> _Part:
        """The first ``count`` blocks alone."""
        blocks = replace(self.blocks, stop=self.blocks.start + count)
        return _Part(blocks, self.ids[:count], self.hashes[:count])


class BlockMoves(TreeObserver):
    """Sends blocks of one engine down; to be used on the engine's thread.

    Args:
        rows: the pool's blocks as bytes.
        writer: writes them.
        known: blocks that need not be written again.
        policy: which blocks go down.
        block_bytes: of one block's encoded tokens.
        keeps_partly_filled: whether any tier keeps partly filled blocks.
        on_clear: called with a namespace that was cleared, or None for all.
    """

    def __init__(
        self,
        rows: PoolRows,
        writer: BlockWriter,
        known: KnownBlocks,
        policy: CacheWritePolicy,
        block_bytes: int,
        keeps_partly_filled: bool,
        on_clear: Callable[[str | None], None],
    ) -> None:
        self._rows = rows
        self._writer = writer
        self._known = known
        self._policy = policy
        self._block_bytes = block_bytes
        self._on_clear = on_clear
        self._keeps_partly_filled = keeps_partly_filled
        self._stopped = False
        self._evicted: list[_Part] = []  # still in place
        self._wanted = WantedPrefixes()

    # -- called by the tree --------------------------------------------------------------------------------------

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        if evicted and not self._stopped:
            self._list(node, start)

    def on_insert(self, node: Node, start: int) -> None:
        if self._stopped:
            return
        self._known.discard(node.block_hashes()[start:])
        if self._policy == "write-through" and start < self._num_whole(node):
            self._want(node, continues=start > 0)

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        if namespace is None:
            self._known.clear()
            self._evicted.clear()
            self._wanted.clear()
        else:
            group = namespace_group(namespace)
            self._known.clear_group(group)
            self._evicted = [each for each in self._evicted if namespace_group(each.blocks.namespace) != group]
            self._wanted.forget(lambda each: namespace_group(each) == group)
        self._on_clear(namespace)

    # -- called by the engine ------------------------------------------------------------------------------------

    def note_reused(self, table: BlockTable, behind: bytes) -> None:
        """A sequence began with cached blocks, which are thus used for at least the second time.

        Args:
            table: of the sequence, just opened.
            behind: the cached tokens behind the whole blocks that it shares, encoded.
        """
        if self._policy != "write-back" and table.node is not None:
            self._want(table.node, behind if self._parts_inside(table.node, behind) else b"")

    def note_missing(self, table: BlockTable, block: bytes) -> None:
        """A sequence began, and no tier had the first block that it computes: others may be gone as well.

        Args:
            table: of the sequence, just opened.
            block: the block's tokens, encoded.
        """
        if table.node is not None:
            before = [namespace_hash(table.namespace), *self._path_hashes(table.node)][-1]
            self._known.lost(next_hash(before, block))

    def want_prefix(self, tokens: bytes, namespace: str) -> None:
        """Send down what is cached of a prefix of whole blocks, whatever the policy, before all prefixes that wait."""
        if tokens:
            self._wanted.add_first(WantedPrefix(namespace, tokens, self._prefix_hashes(namespace, tokens)))

    def note_loaded(self, namespace: str, tokens: bytes, first: int) -> None:
        """The blocks of a prefix from index ``first`` on were loaded, so tiers have them."""
        self._known.add(self._prefix_hashes(namespace, tokens)[first:], namespace)

    def stop(self) -> None:
        """Send nothing more down."""
        self._stopped = True
        self._evicted.clear()
        self._wanted.clear()

    def send_down(self, cache: PrefixCache, timeout: float = 0.0) -> None:
        """Read the bytes of evicted blocks, which nothing may have overwritten yet, and of some others that go down.

        Args:
            cache: of the blocks.
            timeout: seconds to wait for the writer to have room for others; 0: the engine computes, and does not wait.
        """
        parts = []
        for evicted in self._evicted:
            # The first ones: blocks of a prefix behind a gap cannot be found.
            count = self._writer.reserve_or_drop(len(evicted.ids))
            self._known.discard(evicted.hashes[count:])
            if count:
                parts.append(evicted.first(count))
        self._evicted.clear()
        completed: list[PrefixBlocks] = []
        if self._wanted:
            taken, completed = self._take_wanted(cache, timeout)
            parts += taken
        self._send(parts, completed, cache.copy_targets)

    @property
    def has_unsent(self) -> bool:
        """Whether evicted blocks are still to be sent: until then, they are found neither in the pool nor below."""
        return bool(self._evicted)

    @property
    def has_wanted(self) -> bool:
        """Whether blocks that are not evicted are still to be sent."""
        return len(self._wanted) > 0

    def write_wanted(self, cache: PrefixCache, seconds_left: Callable[[], float]) -> None:
        """Send down all wanted prefixes, while there is time left."""
        while self._wanted and (left := seconds_left()) > 0:
            self._send(*self._take_wanted(cache, min(left, _MAX_WAIT_SECONDS)), cache.copy_targets)

    def write_hot(self, cache: PrefixCache, num_blocks: int, seconds_left: Callable[[], float]) -> None:
        """Send what is in the tree down while there is time left, most recently used first.

        At most ``num_blocks`` are sent: more would take the place of the first ones.
        """
        self._wanted.clear()
        # A tier that failed for a while has dropped what was sent; tiers that have a block do not write it again.
        self._known.clear()
        sent: list[PrefixBlocks] = []
        for namespace, tokens, num_bytes_before in hot_prefixes(cache.tree_snapshot()):
            start, stop = num_bytes_before // self._block_bytes, len(tokens) // self._block_bytes
            stop += self._is_worth_its_room(len(tokens) % self._block_bytes, stop)
            stop = min(stop, start + num_blocks)
            if start == stop:
                continue
            tokens = tokens[: stop * self._block_bytes]
            self._wanted.add(WantedPrefix(namespace, tokens, self._prefix_hashes(namespace, tokens)))
            self.write_wanted(cache, seconds_left)
            sent.append(PrefixBlocks(namespace, tokens, start, stop))
            num_blocks -= stop - start
            if self._wanted or not num_blocks:
                break
        for part in reversed(sent):  # written last, the coldest would be the last to make room
            self._writer.mark_used(part)

    # -- internals -----------------------------------------------------------------------------------------------

    def _list(self, node: Node, start: int) -> None:
        stop = self._num_whole(node)
        stop += self._is_worth_its_room(len(node.tokens) % self._block_bytes, node.depth + stop)
        hashes = node.block_hashes()
        while start < stop and hashes[start] in self._known:
            start += 1
        if start < stop:
            tokens = self._path_tokens(node, stop)
            blocks = PrefixBlocks(node.namespace, tokens, node.depth + start, node.depth + stop)
            self._evicted.append(_Part(blocks, node.block_ids(start, stop), hashes[start:stop]))
            self._known.add(hashes[start:stop], node.namespace)

    def _want(self, node: Node, behind: bytes = b"", *, continues: bool = False) -> None:
        """Send down the path to a node's last whole block, and the perhaps partly filled block that holds ``behind``.

        Args:
            continues: see `WantedPrefix`.
        """
        hashes = self._path_hashes(node)
        if not self._is_worth_its_room(len(behind), len(hashes)):
            behind = b""
        if behind:
            hashes.append(next_hash(hashes[-1], behind))
        if not all(block_hash in self._known for block_hash in reversed(hashes)):  # the last are the newest
            tokens = self._path_tokens(node, self._num_whole(node)) + behind
            self._wanted.add(WantedPrefix(node.namespace, tokens, hashes, continues))

    def _take_wanted(self, cache: PrefixCache, timeout: float) -> tuple[list[_Part], list[PrefixBlocks]]:
        """Some blocks of wanted prefixes, with room reserved for them, and the prefixes that are complete with them."""
        taken: list[_Part] = []
        completed: list[PrefixBlocks] = []
        room = self._writer.reserve(_BLOCKS_PER_STEP, timeout, 1.0 if timeout else _SHARE_DURING_STEPS)
        num_looked_at = 0
        while self._wanted and room and num_looked_at < _PREFIXES_PER_STEP:
            num_looked_at += 1
            wanted = self._wanted.first()
            ids = cache.cached_blocks(decode(wanted.tokens), wanted.namespace)
            hashes, start = wanted.hashes, wanted.start
            while start < len(ids) and hashes[start] in self._known:
                start += 1
            stop = start
            while stop < min(len(ids), start + room) and hashes[stop] not in self._known:
                stop += 1
            if start == stop:
                if wanted.counts_as_use:
                    completed.append(PrefixBlocks(wanted.namespace, wanted.tokens, 0, len(hashes)))
                self._wanted.remove_first()
                continue
            blocks = PrefixBlocks(wanted.namespace, wanted.tokens[: stop * self._block_bytes], start, stop)
            taken.append(_Part(blocks, ids[start:stop], hashes[start:stop]))
            self._known.add(hashes[start:stop], wanted.namespace)
            room -= stop - start
            wanted.start = stop
            wanted.num_sent += stop - start
        self._writer.give_back(room)
        return taken, completed

    def _send(self, parts: list[_Part], completed: list[PrefixBlocks], copy_targets: set[int]) -> None:
        """Have the writer write blocks for which it has reserved room, and mark the prefixes complete with them as used.

        A block among `PrefixCache.copy_targets` lacks what it should hold, and is dropped: the partly filled last block of a
        sequence that ended before it computed anything.
        """
        sent: list[_Part] = []
        partly_filled: dict[int, int] = {}
        num_rows = 0
        for part in parts:
            num_filled = (len(part.blocks.tokens) - (part.blocks.stop - 1) * self._block_bytes) // TOKEN_BYTES
            if num_filled * TOKEN_BYTES < self._block_bytes:
                if int(part.ids[-1]) in copy_targets:
                    self._known.discard(part.hashes[-1:])
                    self._writer.drop(1)
                    part = part.first(len(part.ids) - 1)
                else:
                    partly_filled[num_rows + len(part.ids) - 1] = num_filled
            if len(part.ids):
                sent.append(part)
                num_rows += len(part.ids)
        if sent:
            self._send_rows(sent, partly_filled)
        # Written in several parts, the first one first; but the last one is to make room first.
        for prefix in completed:
            self._writer.mark_used(prefix)

    def _send_rows(self, parts: list[_Part], partly_filled: dict[int, int]) -> None:
        try:
            data = self._rows.read(np.concatenate([part.ids for part in parts]))
        # Out of memory, in torch and in numpy: requests do not need these blocks.
        except (RuntimeError, MemoryError) as error:
            self._writer.drop(sum(len(part.ids) for part in parts))
            self._known.clear()
            _log.warning("blocks on their way below the pool are lost: %s", error)
            return
        self._writer.put(
            [part.blocks for part in parts],
            partial(self._fetch, data, self._rows.fence(), partly_filled),
            partial(self._rows.release, data),
        )

    def _fetch(self, data: Any, fence: Any, partly_filled: dict[int, int]) -> BlockBytes:
        """The blocks that were read, in host memory; called by the thread that writes.

        Args:
            data: from `PoolRows.read`.
            fence: made after that.
            partly_filled: how many tokens each partly filled row holds.
        """
        rows = self._rows.to_host(data, fence)
        # Behind these tokens may be keys and values of other prompts, even of other tenants.
        for row, num_tokens in partly_filled.items():
            self._rows.erase_behind(rows[row], num_tokens)
        return rows

    def _parts_inside(self, node: Node, behind: bytes) -> bool:
        """Whether prompts diverge in the block after a node, behind its tokens ``behind``: others may share these."""
        if len(behind) == self._block_bytes or node.children is None:
            return True
        if behind in node.children.by_key:
            return False  # all of a partly filled block: either a fuller one replaces it, or it goes down when it is evicted
        # Prompts that part a little later than others do so by chance.
        lengths = range(TOKEN_BYTES, len(behind), TOKEN_BYTES)
        before = node.block_hashes()[-1]
        return not any(next_hash(before, behind[:length]) in self._known for length in lengths)

    def _is_worth_its_room(self, num_bytes: int, num_before: int) -> bool:
        """Whether to send down a partly filled block with ``num_bytes`` of tokens, behind ``num_before`` others.

        `find_prefix` finds none that is alone.
        """
        return num_before > 0 and self._keeps_partly_filled and is_filled_enough(num_bytes, self._block_bytes)

    def _prefix_hashes(self, namespace: str, tokens: bytes) -> list[int]:
        return next_hashes(namespace_hash(namespace), tokens, self._block_bytes)

    def _num_whole(self, node: Node) -> int:
        return len(node.tokens) // self._block_bytes

    def _path_hashes(self, node: Node) -> list[int]:
        """The hashes of the whole blocks of the prefix up to a node's end."""
        hashes: list[int] = []
        for step in [*node.path()][-2::-1]:  # without the root
            hashes += step.block_hashes()[: self._num_whole(step)]
        return hashes

    def _path_tokens(self, node: Node, num_blocks: int) -> bytes:
        """The prefix up to and including the node's first ``num_blocks`` blocks."""
        above = [bytes(step.tokens) for step in node.path() if step is not node]
        return b"".join([*reversed(above), bytes(node.tokens[: num_blocks * self._block_bytes])])
