"""In which order a tier's blocks make room: the least recently used first, but none before the blocks behind it.

A block is of no use without those before it, so only leaves make room, as in the pool's tree. A tier may lack blocks in the
middle of a prefix, for instance because the pool gives up the last ones first. What is before them is protected as well: a
missing block stays in the tree as long as another is behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count

from radixkv.cache.lazy_heap import LazyHeap
from radixkv.tiers.block_key import BlockKey


class EvictionOrder:
    """The blocks of one tier as a tree of digests. One thread at a time may call.

    What a call takes does not depend on how many blocks are before one, except where these are seen for the first time.

    Args:
        digests: of blocks that are there, least recently used first; what is before them is learned from later calls.
    """

    def __init__(self, digests: Iterable[bytes] = ()) -> None:
        self._clock = count()
        # Of missing blocks, too, while they have children: it counts for those before them.
        self._last_use = dict(zip(digests, self._clock, strict=False))
        self._present = set(self._last_use)
        self._parents: dict[bytes, bytes] = {}  # as far as they are known; also of missing blocks
        # How many children a block has, the blocks directly behind it, each `hold` of it counting as one; only where not 0.
        self._num_children: dict[bytes, int] = {}
        self._leaves = LazyHeap[bytes]()  # blocks that are there and have no children, by last use
        for digest, used in self._last_use.items():
            self._leaves.push(digest, used)

    def first(self) -> bytes | None:
        """The block that makes room next; None: each is held, or before one that is."""
        return self._leaves.first()[1] if self._leaves else None

    def use(self, prefix: Sequence[BlockKey]) -> None:
        """Consecutive blocks were used now: the last that is there of them and the one before them, and all before that."""
        parent = prefix[0].parent if prefix else None
        for key in reversed(prefix if parent is None else [parent, *prefix]):
            if key.digest in self._present:
                return self.add(key)  # counts for all before it

    def add(self, key: BlockKey) -> None:
        """A block is there, and was used now."""
        self._link(key)
        self._mark(key.digest)

    def remove(self, digest: bytes) -> None:
        """A block is not there any more."""
        self._present.remove(digest)
        if digest not in self._num_children:
            self._leaves.remove(digest)
            self._remove_child(self._parents.pop(digest, None), self._last_use.pop(digest))

    def hold(self, key: BlockKey) -> None:
        """Protect a block, which may still be missing, and all before it until `release`."""
        self._link(key)
        self._add_child(key.digest)

    def release(self, key: BlockKey) -> None:
        """End what `hold` began."""
        self._remove_child(key.digest, 0)

    def _mark(self, digest: bytes) -> None:
        is_leaf = digest not in self._num_children
        if is_leaf and digest in self._present:
            self._leaves.remove(digest)
        self._present.add(digest)
        used = self._last_use[digest] = next(self._clock)
        if is_leaf:
            self._leaves.push(digest, used)

    def _link(self, key: BlockKey) -> None:
        """Note what is before a block, up to one of which that is known."""
        while key.parent is not None and key.digest not in self._parents:
            self._parents[key.digest] = key.parent.digest
            key = key.parent
            self._add_child(key.digest)

    def _add_child(self, digest: bytes) -> None:
        """A block has one child more, and so is no leaf."""
        num_children = self._num_children[digest] = self._num_children.get(digest, 0) + 1
        if num_children == 1 and digest in self._present:
            self._leaves.remove(digest)

    def _remove_child(self, digest: bytes | None, used: int) -> None:
        """A block has one child less, which was last used at ``used``; missing blocks without children are forgotten."""
        while digest is not None:
            used = self._last_use[digest] = max(used, self._last_use.get(digest, 0))
            self._num_children[digest] -= 1
            if self._num_children[digest]:
                return
            del self._num_children[digest]
            if digest in self._present:
                self._leaves.push(digest, used)
                return
            del self._last_use[digest]
            digest = self._parents.pop(digest, None)
