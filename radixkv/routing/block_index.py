"""Which replicas hold which blocks: a dictionary of block hashes, each with the set of its replicas as the bits of a number.

What a replica holds is closed under prefixes (a block is evicted before the one it follows), so the sets along a prompt only
shrink, and where each of them ends is found by bisection: a prompt of 2,000 blocks takes a dozen look-ups for each set of
replicas that end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockIndex:
    """Block hashes and the replicas that hold them.

    There is an entry, of about 100 bytes, for each block that a replica holds: memory is bounded by the replicas' caches, of
    which it takes a thousandth. Nothing that is held is forgotten, so events must be complete.
    """

    def __init__(self) -> None:
        self._entries: dict[int, int] = {}
        self._holding = 0  # the replicas that may have entries, as bits

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, block_hashes: Iterable[int], replica: int) -> None:
        """Note that a replica, a number from 0 on, holds these blocks."""
        bit, entries = 1 << replica, self._entries
        self._holding |= bit
        for block_hash in block_hashes:
            entries[block_hash] = entries.get(block_hash, 0) | bit

    def discard(self, block_hashes: Iterable[int], replica: int) -> None:
        """Note that it does not hold them any more."""
        kept = ~(1 << replica)
        for block_hash in block_hashes:
            mask = self._entries.get(block_hash)
            if mask is not None:
                self._set(block_hash, mask & kept)

    def clear(self, replica: int) -> None:
        """Note that a replica holds nothing. Visits all entries, 0.1 s for a million, unless it held nothing before."""
        bit = 1 << replica
        if not self._holding & bit:
            return
        self._holding ^= bit
        for block_hash in [block_hash for block_hash, mask in self._entries.items() if mask & bit]:
            self._set(block_hash, self._entries[block_hash] & ~bit)

    def replicas(self, block_hash: int) -> int:
        """The replicas that hold a block, as bits."""
        return self._entries.get(block_hash, 0)

    def hits(self, block_hashes: Sequence[int]) -> list[tuple[int, int]]:
        """How far each replica holds a prompt.

        Args:
            block_hashes: of the prompt's whole blocks, in order.

        Returns:
            Pairs of replicas, as bits, and the number of leading blocks that they hold; without those that hold none.
        """
        if not block_hashes:
            return []
        found: list[tuple[int, int]] = []
        entries, end = self._entries, len(block_hashes)
        active, known = self.replicas(block_hashes[0]), 1
        while active:
            # The first block that not all of them hold is behind `low` or at `high`, where `mask` are those that hold it.
            low, high, mask = known - 1, end, 0
            probe = end - 1
            while high - low > 1:
                here = entries.get(block_hashes[probe], 0)
                if here & active == active:
                    low = probe
                else:
                    high, mask = probe, here
                probe = (low + high) // 2
            found.append((active & ~mask, high))
            active, known = active & mask, high + 1
        return found

    def _set(self, block_hash: int, mask: int) -> None:
        if mask:
            self._entries[block_hash] = mask
        else:
            del self._entries[block_hash]
