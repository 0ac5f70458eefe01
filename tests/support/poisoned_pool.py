"""Memory that nothing was written to, filled so that a test sees every read of it."""

from __future__ import annotations

from collections.abc import Sequence

from radixkv.memory import KVPool


def poison(pool: KVPool, blocks: Sequence[int]) -> None:
    """Fill blocks with NaN."""
    for tensor in (*pool.keys, *pool.values):
        tensor[list(blocks)] = float("nan")
