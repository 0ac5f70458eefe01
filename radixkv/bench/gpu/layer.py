"""One layer's problem as the GPU benches pose it: a tree of sequences over shuffled blocks, a pool, and random queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention import AttentionOptions, NewTokens, QueryBatch
from radixkv.memory import KVPool, LayerShape
from radixkv.memory.fp8_kv_pool import FP8, Fp8KVPool, KVScales

HEADS, KV_HEADS, DIM = 32, 8, 128
TOKEN_BYTES = 2 * KV_HEADS * DIM * 2
BLOCK_SIZE = 16


@dataclass(eq=False, slots=True)
class FixedTable:
    """A block table that never changes a block."""

    block_ids: NDArray[np.int32]
    version: int = 0


class Attends(Protocol):
    """An `AttentionBatch`, or a batch as CUDA graphs run it."""

    def attend(self, layer: int, new: NewTokens, options: AttentionOptions) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class Level:
    """``groups`` nodes of ``tokens`` each, every one shared by an equal part of the batch."""

    groups: int
    tokens: int


def tree_batch(batch: int, levels: list[Level], num_new: int, shuffled: bool = True) -> tuple[QueryBatch, int, int]:
    """A batch over blocks: each sequence passes through one node of every level, then has its new tokens.

    Args:
        shuffled: blocks are scattered; otherwise those of a node, or of a sequence, are contiguous.

    Returns:
        The batch, how many blocks all of it takes, and how many different tokens lie in them.
    """
    counts = [-(-level.tokens // BLOCK_SIZE) * level.groups for level in levels]
    fresh = -(-num_new // BLOCK_SIZE) + 1
    total = sum(counts) + batch * fresh
    ids = np.arange(total, dtype=np.int32)
    if shuffled:
        np.random.default_rng(0).shuffle(ids)
    starts = np.concatenate(([0], np.cumsum(counts)))
    tables = []
    for row in range(batch):
        parts = []
        for level, start in zip(levels, starts, strict=False):
            blocks = -(-level.tokens // BLOCK_SIZE)
            node = start + row * level.groups // batch * blocks
            parts.append(ids[node : node + blocks])
        own = sum(counts) + row * fresh
        parts.append(ids[own : own + fresh])
        tables.append(FixedTable(np.concatenate(parts)))
    context = sum(level.tokens for level in levels)
    query_batch = QueryBatch(tables, np.full(batch, context), np.full(batch, num_new))
    return query_batch, total, sum(level.groups * level.tokens for level in levels) + batch * num_new


def max_tokens(batch: QueryBatch) -> int:
    """How many tokens the longest of its tables holds."""
    return max(len(table.block_ids) for table in batch.tables) * BLOCK_SIZE


def make_pool(num_blocks: int, dtype: torch.dtype, device: str, num_layers: int = 1) -> KVPool:
    """Layers of random keys and values; float8 has a scale per head."""
    layers = [LayerShape(KV_HEADS, DIM, DIM)] * num_layers
    if dtype != FP8:
        pool = KVPool(layers, num_blocks, BLOCK_SIZE, dtype, device)
        for tensor in (*pool.keys, *pool.values):
            tensor.normal_()
        return pool
    scales = KVScales(*([torch.full((KV_HEADS,), scale)] * num_layers for scale in (0.5, 2.0)))
    pool = Fp8KVPool(layers, num_blocks, BLOCK_SIZE, scales, torch.bfloat16, device)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, dtype=torch.bfloat16, device=device))
    return pool


def layer_work(batch: Attends, rows: int, num_layers: int = 1) -> Callable[[], object]:
    """A call that runs the attention of layers one after the other, on ``rows`` random queries, keys and values."""
    query = torch.randn(1, HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda")
    key, value = (torch.randn(1, KV_HEADS, rows, DIM, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    new, options = NewTokens(query, key, value), AttentionOptions(DIM**-0.5)
    return lambda: [batch.attend(layer, new, options) for layer in range(num_layers)]
