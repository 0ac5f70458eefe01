"""A memory of evicted prefixes, by their hashes (a ghost list, as in ARC: Megiddo and Modha, FAST 2003).

When blocks are evicted from a node, one record is kept of them: 8 bytes per block for its hash, and about 330 bytes for the
rest. When the first of them are computed anew, the others stay remembered. The oldest records are dropped when more blocks
are remembered than allowed. The records explain why a prompt is recomputed (`PrefixCache.explain`). For a policy that learns,
they also preserve a prefix's number of uses across its eviction, and show that what it evicted was requested again.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from radixkv.cache.block_hash import namespace_hash, next_hash, next_hashes
from radixkv.cache.eviction import LearningPolicy
from radixkv.cache.node import Node
from radixkv.cache.observer import TreeObserver
from radixkv.cache.tokens import TOKEN_BYTES


@dataclass(eq=False, slots=True)
class EvictedBlocks:
    """Consecutive blocks of one path that were evicted together.

    Attributes:
        hashes: of each block.
        num_tokens: in all of them; the last block may be partly filled.
        last_use, evicted_at: by the cache's clock, in seconds.
        uses: how many sequences, pins and loads from elsewhere had begun with them.
        group: the policy's note (`EvictableLeaf.group`).
    """

    namespace: str
    hashes: array[int]
    num_tokens: int
    last_use: float
    uses: int
    group: int
    evicted_at: float


class EvictedPrefixes(TreeObserver):
    """Records of the last ``max_blocks`` evicted blocks, found by the hash of a record's first block.

    Args:
        learner: is notified when evicted blocks are about to be recomputed.
    """

    def __init__(
        self, max_blocks: int, block_size: int, clock: Callable[[], float], learner: LearningPolicy | None
    ) -> None:
        self.num_blocks = 0
        self._max_blocks = max_blocks
        self._block_size = block_size
        self._block_bytes = block_size * TOKEN_BYTES
        self._clock = clock
        self._learner = learner
        # Oldest first. Not a dict: finding the first key of a dict that shrinks from its front takes ever longer.
        self._records: OrderedDict[int, EvictedBlocks] = OrderedDict()

    def on_remove(self, node: Node, start: int, evicted: bool) -> None:
        if not evicted:
            return
        hashes = node.block_hashes()
        record = EvictedBlocks(
            node.namespace,
            hashes[start:] if start else hashes,
            node.num_tokens - start * self._block_size,
            node.last_use,
            node.uses,
            node.group,
            self._clock(),
        )
        self._file(record)
        while self.num_blocks > self._max_blocks:
            self.num_blocks -= len(self._records.popitem(last=False)[1].hashes)

    def on_clear(self, namespace: str | None, nodes: Sequence[Node]) -> None:
        for key in [key for key, record in self._records.items() if namespace in (None, record.namespace)]:
            self._drop(key)

    def covering(self, prompt: bytes, namespace: str, start: int) -> Iterator[tuple[int, EvictedBlocks]]:
        """What was evicted of a prompt from token ``start``, a block boundary, on without a gap.

        Yields:
            For each block, where that ends, in tokens, and the newest record of it.
        """
        size, block_bytes = self._block_size, self._block_bytes
        hashes = [namespace_hash(namespace)]
        hashes += next_hashes(hashes[0], prompt, block_bytes)
        found: list[tuple[int, EvictedBlocks]] = []
        for index, before in enumerate(hashes[:-1]):
            # A record may begin before the start: a prefix is evicted whole, and then only its first blocks computed anew.
            position, offset = index * size, index * block_bytes
            found = [(stop, record) for stop, record in found if stop > position]
            record = self._find(before, prompt, offset, partial=position == start and not found)
            if record is not None:
                same = self._same_hashes(record, before, prompt, offset)
                found.append((position + min(len(same) * size, record.num_tokens), record))
            if position == start:
                if not found:
                    return
                ends = [(min(stop, start + size), record) for stop, record in found]
                start, newest = max(ends, key=lambda end: (end[0], end[1].evicted_at))
                yield start, newest

    def recall(self, node: Node, prompt: bytes, stop: int) -> list[tuple[int, int]]:
        """The evicted blocks of a prompt that are about to be recomputed; notifies the learner, and forgets them.

        Args:
            node: holds the block before them, as its last.
            stop: that block is the prompt's block ``stop - 1``.

        Returns:
            ``(stop, uses)`` in ascending order: the prompt's blocks from the previous ``stop`` to this one had been used that
            often. Empty without a learner.
        """
        if self._learner is None or not self._records:
            return []
        past: list[tuple[int, int]] = []
        now = self._clock()
        for record, num_tokens in list(self._follow(node.block_hashes()[-1], prompt, stop * self._block_bytes)):
            self._drop(record.hashes[0])
            self._file_rest(record, -(-num_tokens // self._block_size))
            stop += num_tokens // self._block_size
            if past and past[-1][1] == record.uses:
                past.pop()
            past.append((stop, record.uses))
            self._learner.on_reuse(record.group, -(-num_tokens // self._block_size), record.last_use, now, True)
        return past

    def _follow(self, before: int, prompt: bytes, offset: int) -> Iterator[tuple[EvictedBlocks, int]]:
        """The records along a prompt from byte ``offset`` on, each with how many of its tokens the prompt shares.

        Args:
            before: hash of the prompt's last block before the offset, or of the namespace.
        """
        while (record := self._find(before, prompt, offset, partial=False)) is not None:
            same = self._same_hashes(record, before, prompt, offset)
            if not same:
                return
            num_tokens = min(len(same) * self._block_size, record.num_tokens)
            yield record, num_tokens
            if num_tokens % self._block_size:
                return
            before = same[-1]
            offset += num_tokens * TOKEN_BYTES

    def _find(self, before: int, prompt: bytes, offset: int, partial: bool) -> EvictedBlocks | None:
        """The record that begins with the prompt's next block.

        Args:
            partial: accept a record of one partly filled block as well, at one more look-up per possible length.
        """
        record = self._records.get(next_hash(before, prompt[offset : offset + self._block_bytes]))
        if record is not None or not partial:
            return record
        keys = (
            next_hash(before, prompt[offset : offset + length])
            for length in range(self._block_bytes - TOKEN_BYTES, 0, -TOKEN_BYTES)
        )
        return next((self._records[key] for key in keys if key in self._records), None)

    def _same_hashes(self, record: EvictedBlocks, before: int, prompt: bytes, offset: int) -> list[int]:
        """The hashes of those of a record's blocks that the prompt shares."""
        stop = offset + record.num_tokens * TOKEN_BYTES
        own = next_hashes(before, prompt[offset:stop], self._block_bytes)
        return own[: _num_equal(own, record.hashes.tolist())]

    def _file(self, record: EvictedBlocks) -> None:
        """Add a record. Of an older one that begins alike, what it has beyond their common blocks is kept."""
        key = record.hashes[0]
        older = self._records.get(key)
        if older is not None:
            self._drop(key)
        self._records[key] = record
        self.num_blocks += len(record.hashes)
        if older is not None:
            self._file_rest(older, _num_equal(older.hashes, record.hashes))

    def _file_rest(self, record: EvictedBlocks, start: int) -> None:
        """Keep what a dropped record has from index ``start`` on, and beyond blocks that have records of their own."""
        while (rest := record.hashes[start:]) and rest[0] in self._records:
            start += _num_equal(rest, self._records[rest[0]].hashes)
        if rest:
            record.hashes = rest
            record.num_tokens -= start * self._block_size
            self._file(record)

    def _drop(self, key: int) -> None:
        self.num_blocks -= len(self._records.pop(key).hashes)


def _num_equal(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two lists of hashes."""
    if a == b:
        return len(a)
    differ = (index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y)
    return next(differ, min(len(a), len(b)))
