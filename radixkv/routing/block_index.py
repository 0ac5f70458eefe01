"""Which replicas hold which blocks: a dictionary of block hashes, each with the set of its replicas as the bits of a number.

What a replica holds is closed under prefixes (a block is evicted before the one it follows), so the sets along a prompt only
shrink, and where each of them ends is found by bisection: a prompt of 2,000 blocks takes a dozen look-ups for each set of
replicas that end together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockIndex:
    """Block hashes and the replicas that hold them.

    Entries are kept in two generations. When the younger one is full, the older one is forgotten, and the younger becomes the
    older one; a block that is stored again is young again. So memory is bounded, by about 100 bytes for each block.

    Args:
        max_blocks: blocks to remember at most. The blocks of all replicas together are enough to forget none that is cached.

    Raises:
        ValueError: ``max_blocks`` is below 2.
    """

    def __init__(self, max_blocks: int = 2_000_000) -> None:
        if not isinstance(max_blocks, int) or max_blocks < 2:
            raise ValueError(f"max_blocks: expected a whole number of at least 2, got {max_blocks!r}")
        self._half = max_blocks // 2
        self._young: dict[int, int] = {}
        self._old: dict[int, int] = {}
        # One object for each set of replicas, however many blocks have it.
        self._masks: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def add(self, block_hashes: Iterable[int], replica: int) -> None:
        """Note that a replica, a number from 0 on, holds these blocks."""
        bit = 1 << replica
        young, old, masks = self._young, self._old, self._masks
        for block_hash in block_hashes:
            before = young.get(block_hash)
            if before is None:
                if len(young) >= self._half:
                    self._old, self._young = old, young = young, {}
                    masks.clear()
                before = old.pop(block_hash, 0)
            mask = before | bit
            young[block_hash] = masks.setdefault(mask, mask)

    def discard(self, block_hashes: Iterable[int], replica: int) -> None:
        """Note that it does not hold them any more."""
        kept = ~(1 << replica)
        for entries in (self._young, self._old):
            for block_hash in block_hashes:
                mask = entries.get(block_hash)
                if mask is not None:
                    self._set(entries, block_hash, mask & kept)

    def clear(self, replica: int) -> None:
        """Note that a replica holds nothing. It walks over all entries: 0.1 s for a million."""
        kept = ~(1 << replica)
        for entries in (self._young, self._old):
            for block_hash in [block_hash for block_hash, mask in entries.items() if mask & ~kept]:
                self._set(entries, block_hash, entries[block_hash] & kept)

    def replicas(self, block_hash: int) -> int:
        """The replicas that hold a block, as bits."""
        return self._young.get(block_hash) or self._old.get(block_hash, 0)

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
        young, old, end = self._young, self._old, len(block_hashes)
        active, known = self.replicas(block_hashes[0]), 1
        while active and known < end:
            # The first block that not all of them hold is behind `low` or at `high`.
            low, high, mask = known - 1, end, 0
            probe = end - 1
            while high - low > 1:
                block_hash = block_hashes[probe]
                here = young.get(block_hash) or old.get(block_hash, 0)
                if here & active == active:
                    low = probe
                else:
                    high, mask = probe, here
                probe = (low + high) // 2
            if high == end:
                break
            found.append((active & ~mask, high))
            active, known = active & mask, high + 1
        if active:
            found.append((active, end))
        return found

    def _set(self, entries: dict[int, int], block_hash: int, mask: int) -> None:
        if mask:
            entries[block_hash] = self._masks.setdefault(mask, mask)
        else:
            del entries[block_hash]
