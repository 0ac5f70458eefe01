"""Where runs of k tokens occurred last: a hash table that is bounded in memory, and may forget.

The table is direct-mapped and holds only positions, not the runs: the tokens at a position that is found must be compared.
So an entry takes four bytes, a newer run overwrites an older one, and what an entry points to may be gone.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import mul

import numpy as np
from numpy.typing import NDArray

_BASE = 0x9E3779B97F4A7C15
_MIX = 0xD6E8FEB86659FD93
_MASK = 2**64 - 1
_NOWHERE = -1

# Lengths of runs that are looked for, the longest first: where a long one is found, the text mostly goes on in the same way.
# Single tokens were found nearly always: that saved 3 to 6 % of steps where code is rewritten, but beside 16 unrelated
# sequences 4 to 7 rows in 100 were drafted for nothing.
RUN_LENGTHS = (8, 4, 2)
MAX_RUN = RUN_LENGTHS[0]
_POWERS = tuple(pow(_BASE, i, 2**64) for i in range(MAX_RUN + 1))
_POWERS_ON_HOST = np.array(_POWERS, dtype=np.uint64)
# So that tokens of id 0 count, too.
_SUMS = tuple(sum(_POWERS[:k]) for k in range(MAX_RUN + 1))


def kgram_hash(tokens: Sequence[int], seed: int = 0) -> int:
    """The hash of a run of tokens.

    Args:
        tokens: the run, of at most `MAX_RUN`.
        seed: of a namespace, say: the same run has another hash under another seed.
    """
    k = len(tokens)
    value: int = sum(map(mul, reversed(tokens), _POWERS)) + _SUMS[k] + seed * _POWERS[k] & _MASK
    return value


def kgram_hashes(tokens: NDArray[np.int32], k: int, seed: int = 0) -> NDArray[np.uint64]:
    """`kgram_hash` of all runs of ``k`` tokens, ``[tokens - k + 1]``, in order: a polynomial modulo 2**64."""
    hashes: NDArray[np.uint64] = np.convolve(tokens.astype(np.uint64), _POWERS_ON_HOST[:k], "valid")
    hashes += np.uint64(_SUMS[k] + seed * _POWERS[k] & _MASK)
    return hashes


class KGramTable:
    """Positions by hash.

    Args:
        num_entries: how many it can hold; rounded up to a power of two.
    """

    def __init__(self, num_entries: int) -> None:
        self._bits = max(4, (max(num_entries, 1) - 1).bit_length())
        self._positions: NDArray[np.int32] = np.full(1 << self._bits, _NOWHERE, dtype=np.int32)
        # Single entries are reached several times as fast this way.
        self._entries = memoryview(self._positions)  # type: ignore[arg-type]

    @property
    def nbytes(self) -> int:
        """Size of the table."""
        return self._positions.nbytes

    def put_all(self, hashes: NDArray[np.uint64], positions: NDArray[np.int32]) -> None:
        """Note at which position the run of each hash occurs; of equal hashes the last one stays."""
        self._positions[(hashes * np.uint64(_MIX)) >> np.uint64(64 - self._bits)] = positions

    def put(self, value: int, position: int) -> None:
        """`put_all` of one."""
        self._entries[(value * _MIX & _MASK) >> 64 - self._bits] = position

    def get(self, value: int) -> int:
        """Where a run of this hash may have occurred last; below 0: nowhere."""
        position: int = self._entries[(value * _MIX & _MASK) >> 64 - self._bits]
        return position
