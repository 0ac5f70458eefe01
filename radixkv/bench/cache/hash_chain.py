"""The baseline for the cache's bookkeeping: prefix caching by a chain of block hashes, reduced to its core.

Every whole block is found by a hash of its tokens and of the hash before it, in one flat dictionary: the method of vLLM's
automatic prefix caching. It does only what any such program must do, with a fast hash, so it is a baseline for the method
and not for one implementation. It finds whole blocks only and evicts nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash
from numpy.typing import NDArray


class HashChainCache:
    """Cached blocks of ``block_size`` tokens by their chained hash."""

    def __init__(self, block_size: int) -> None:
        self._block_bytes = 4 * block_size
        self._block_of: dict[bytes, int] = {}

    def match(self, tokens: NDArray[np.int32]) -> list[int]:
        """The blocks of the longest cached prefix."""
        blocks = []
        for key in self._keys(tokens):
            block = self._block_of.get(key)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def insert(self, tokens: NDArray[np.int32], blocks: list[int]) -> None:
        """Cache a prompt's blocks."""
        for key, block in zip(self._keys(tokens), blocks, strict=True):
            self._block_of.setdefault(key, block)

    def _keys(self, tokens: NDArray[np.int32]) -> Iterator[bytes]:
        data, size, key = tokens.tobytes(), self._block_bytes, b""
        for start in range(0, len(data) // size * size, size):
            key = xxhash.xxh3_128_digest(key + data[start : start + size])
            yield key
