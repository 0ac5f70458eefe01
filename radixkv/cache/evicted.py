"""What was known once: evicted prefixes, remembered by their hashes.

When blocks are evicted from a node, one record is kept of them: 8 bytes a block for its hash, and about 330 bytes for the
rest. The oldest records go when more blocks are remembered than allowed. So a prompt that comes too late can be told so
(`PrefixCache.explain`), a prefix that is computed anew keeps its number of uses, and a policy learns from its mistakes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator

from radixkv.cache.block_hash import next_hash, next_hashes
from radixkv.cache.tokens import TOKEN_BYTES


class EvictedBlocks:
    """Consecutive blocks of one path that went together.

    Attributes:
        hashes: of each block.
        num_tokens: in all of them; the last block may be partly filled.
        last_use, evicted_at: the cache's clock, in seconds.
        uses: how many sequences had begun with them.
        group: the policy's note.
    """

    __slots__ = ("evicted_at", "group", "hashes", "last_use", "namespace", "num_tokens", "uses")

    def __init__(
        self,
        namespace: str,
        hashes: array[int],
        num_tokens: int,
        last_use: float,
        uses: int,
        group: int,
        evicted_at: float,
    ) -> None:
        self.namespace = namespace
        self.hashes = hashes
        self.num_tokens = num_tokens
        self.last_use = last_use
        self.uses = uses
        self.group = group
        self.evicted_at = evicted_at


class EvictedPrefixes:
    """The last ``max_blocks`` evicted blocks, found by the hash of a record's first.

    Args:
        block_size: tokens a block.
    """

    def __init__(self, max_blocks: int, block_size: int) -> None:
        self._max_blocks = max_blocks
        self._block_size = block_size
        # Oldest first. Not a dict: to find the first key of one that shrinks from its front takes ever longer.
        self._records: OrderedDict[int, EvictedBlocks] = OrderedDict()
        self.num_blocks = 0

    def __len__(self) -> int:
        """Records."""
        return len(self._records)

    def add(self, record: EvictedBlocks) -> None:
        key = record.hashes[0]
        if key in self._records:
            self._drop(key)
        self._records[key] = record
        self.num_blocks += len(record.hashes)
        while self.num_blocks > self._max_blocks:
            self.num_blocks -= len(self._records.popitem(last=False)[1].hashes)

    def follow(
        self, before: int, prompt: bytes, offset: int, partial: bool = True
    ) -> Iterator[tuple[EvictedBlocks, int]]:
        """The records along a prompt from byte ``offset`` on, each with how many of its tokens the prompt has.

        Args:
            before: hash of the prompt's last block before the offset, or of the namespace.
            partial: look for records of nothing but a partly filled block too: one more look-up a length.
        """
        while (record := self._find(before, prompt, offset, partial)) is not None:
            same = self._same_hashes(record, before, prompt, offset)
            if not same:
                return
            num_tokens = min(len(same) * self._block_size, record.num_tokens)
            yield record, num_tokens
            if num_tokens < record.num_tokens or num_tokens % self._block_size:
                return
            before = same[-1]
            offset += num_tokens * TOKEN_BYTES

    def take(self, before: int, prompt: bytes, offset: int) -> list[tuple[EvictedBlocks, int]]:
        """`follow`, whole blocks first, and forget what is found: it is computed anew."""
        found = list(self.follow(before, prompt, offset, partial=False))
        for record, _ in found:
            self._drop(record.hashes[0])
        return found

    def _find(self, before: int, prompt: bytes, offset: int, partial: bool) -> EvictedBlocks | None:
        """The record that begins with the prompt's next block, or with a part of it."""
        size = self._block_size * TOKEN_BYTES
        record = self._records.get(next_hash(before, prompt[offset : offset + size]))
        if record is not None or not partial:
            return record
        keys = (
            next_hash(before, prompt[offset : offset + length]) for length in range(size - TOKEN_BYTES, 0, -TOKEN_BYTES)
        )
        return next((self._records[key] for key in keys if key in self._records), None)

    def _same_hashes(self, record: EvictedBlocks, before: int, prompt: bytes, offset: int) -> list[int]:
        """The hashes of those of a record's blocks that the prompt has."""
        stop = offset + record.num_tokens * TOKEN_BYTES
        own = next_hashes(before, prompt[offset:stop], self._block_size * TOKEN_BYTES)
        known = record.hashes.tolist()
        if own == known:
            return own
        differ = (place for place, (a, b) in enumerate(zip(own, known, strict=False)) if a != b)
        return own[: next(differ, len(own))]

    def forget(self, namespace: str | None) -> None:
        """Drop all records of a namespace, or of all."""
        for key in [key for key, record in self._records.items() if namespace in (None, record.namespace)]:
            self._drop(key)

    def _drop(self, key: int) -> None:
        self.num_blocks -= len(self._records.pop(key).hashes)
