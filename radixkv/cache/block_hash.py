"""Names for prefixes: each block's hash covers its tokens and all before them, and the namespace.

::

    namespace ── xxh3 ──> h ── tokens of block 0 ──> h0 ── tokens of block 1 ──> h1 ...      h1 names blocks 0 and 1

Another program that has the tokens can compute the same names: ``xxh3_64(token ids as int32 little-endian, seed=hash
before)``. Hashes only find candidates and name blocks to others; what is reused is decided by the tokens themselves.
"""

from __future__ import annotations

import xxhash


def namespace_hash(namespace: str) -> int:
    """The seed of the first block's hash in a namespace."""
    return xxhash.xxh3_64_intdigest(namespace.encode())


def next_hash(before: int, block: bytes) -> int:
    """The hash of a block, whole or partly filled, from its encoded tokens and the hash of the block before."""
    return xxhash.xxh3_64_intdigest(block, seed=before)


def next_hashes(before: int, blocks: bytes, block_bytes: int) -> list[int]:
    """`next_hash` of one block of ``block_bytes`` after another; the last may be partly filled."""
    hashes, digest = [], xxhash.xxh3_64_intdigest
    for offset in range(0, len(blocks), block_bytes):
        before = digest(blocks[offset : offset + block_bytes], before)
        hashes.append(before)
    return hashes
