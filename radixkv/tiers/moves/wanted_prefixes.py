"""Prefixes whose blocks are to go down to the tiers, and can wait for it: they are still in the pool."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# In all prefixes that wait, of which each block takes about a hundred bytes. Those beyond go down when they are evicted.
_MAX_BLOCKS = 1 << 16


@dataclass(slots=True)
class WantedPrefix:
    """A prefix to be sent down: all its blocks that are still in the tree and not known to be below.

    Attributes:
        tokens: of its blocks, the last of which may be partly filled, encoded.
        hashes: of each block.
        continues: whether it is what one sequence computes that became longer, as with each block of an answer.
        start: the blocks before this index are done.
        num_sent: how many of those were sent.
    """

    namespace: str
    tokens: bytes
    hashes: Sequence[int]
    continues: bool = False
    start: int = 0
    num_sent: int = 0

    @property
    def counts_as_use(self) -> bool:
        """Whether all of it is marked as used once it is complete.

        What continues is, each time that it has grown by an eighth of itself or more with what was sent: to mark all of it
        takes longer than to write the block that an answer adds.
        """
        length = len(self.hashes)
        step = 1 << max(0, length.bit_length() - 3)
        return not self.continues or (length - self.num_sent) // step < length // step


class WantedPrefixes:
    """Those that wait, each once, however often it is wanted meanwhile: pinned ones first, then as they came."""

    def __init__(self) -> None:
        # By the namespace and the hash of the last block, which stands for the whole prefix.
        self._waiting: OrderedDict[tuple[str, int], WantedPrefix] = OrderedDict()
        self._num_blocks = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, prefix: WantedPrefix) -> None:
        """Have a prefix wait behind the others, if there is room for it beside them."""
        key = _key(prefix)
        has_room = not self._waiting or self._num_blocks + len(prefix.hashes) <= _MAX_BLOCKS
        if key not in self._waiting and has_room:
            self._waiting[key] = prefix
            self._num_blocks += len(prefix.hashes)

    def add_first(self, prefix: WantedPrefix) -> None:
        """Have a prefix wait before the others, of which the last ones make room for it."""
        key = _key(prefix)
        if key not in self._waiting:
            self._waiting[key] = prefix
            self._num_blocks += len(prefix.hashes)
        self._waiting.move_to_end(key, last=False)
        while self._num_blocks > _MAX_BLOCKS and len(self._waiting) > 1:
            self._num_blocks -= len(self._waiting.popitem()[1].hashes)

    def first(self) -> WantedPrefix:
        """The one whose turn it is; there is one."""
        return next(iter(self._waiting.values()))

    def remove_first(self) -> None:
        """The first one is done."""
        self._num_blocks -= len(self._waiting.popitem(last=False)[1].hashes)

    def forget(self, is_forgotten: Callable[[str], bool]) -> None:
        """Forget the prefixes of some namespaces."""
        kept = [prefix for prefix in self._waiting.values() if not is_forgotten(prefix.namespace)]
        self.clear()
        for prefix in kept:
            self.add(prefix)

    def clear(self) -> None:
        """Forget all."""
        self._waiting.clear()
        self._num_blocks = 0


def _key(prefix: WantedPrefix) -> tuple[str, int]:
    return prefix.namespace, prefix.hashes[-1]
