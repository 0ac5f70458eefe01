"""Blocks to put into tiers, and what a tier may say of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from radixkv.tiers.block_format import BlockFormat
from radixkv.tiers.block_key import BlockKey, block_keys, namespace_digest, next_digest
from radixkv.tiers.tier import BlockBytes, Tier

BLOCK_SIZE = 4
FORMAT = BlockFormat(b"a model", BLOCK_SIZE, 100, dtype="float32", model="tiny")


class FakeClock:
    """Seconds that pass when they are told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def prefix_keys(namespace: str, *blocks: int) -> list[BlockKey]:
    """Keys of a prefix whose blocks hold one token each, so many times."""
    tokens = np.repeat(np.array(blocks, dtype="<i4"), BLOCK_SIZE).tobytes()
    return list(block_keys(namespace_digest(FORMAT.fingerprint, namespace), tokens, 4 * BLOCK_SIZE))


def partly_filled(before: BlockKey, num_tokens: int) -> BlockKey:
    """The key of a partly filled block behind another one."""
    tokens = np.arange(num_tokens, dtype="<i4").tobytes()
    return BlockKey(before.namespace, next_digest(before.digest, tokens), tokens, is_whole=False, parent=before)


def random_blocks(seed: int, count: int, block_bytes: int = FORMAT.block_bytes) -> BlockBytes:
    """Bytes for blocks."""
    return np.random.default_rng(seed).integers(0, 256, (count, block_bytes), dtype=np.uint8)


def get(tier: Tier, keys: Sequence[BlockKey], block_bytes: int = FORMAT.block_bytes) -> BlockBytes:
    """The blocks that a tier returns, in memory that held something else."""
    out = np.full((len(keys), block_bytes), 0xAA, dtype=np.uint8)
    return out[: tier.get_many(keys, out)]


class TierModel:
    """Every content that a tier was given for a key since it was told to forget it."""

    def __init__(self) -> None:
        self.contents: dict[BlockKey, list[bytes]] = {}

    def put(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        for key, block in zip(keys, blocks, strict=True):
            self.contents.setdefault(key, []).append(block.tobytes())

    def clear(self, namespace: bytes | None) -> None:
        self.contents = {k: c for k, c in self.contents.items() if namespace not in (None, k.namespace)}

    def check(self, keys: Sequence[BlockKey], blocks: BlockBytes) -> None:
        for key, block in zip(keys, blocks, strict=False):
            assert block.tobytes() in self.contents.get(key, []), key
