"""Random trees of sequences over scattered blocks, as the kernels take them."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from radixkv_kernels.work_items import NO_PARTIAL, OPEN_END

NAN = float("nan")


@dataclass
class Case:
    """One layer's caches, one row per sequence, and the work that a tree of sequences makes."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    tables: torch.Tensor
    positions: torch.Tensor
    items: dict[int, torch.Tensor]  # by tile rows
    starts: torch.Tensor
    partials: torch.Tensor
    num_partials: int

    def outputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Output, partial output and partial log-sum-exp, all poisoned."""
        rows, heads = self.query.shape[:2]
        dim = self.value_cache.shape[3]
        return (
            torch.full((rows, heads, dim), NAN, dtype=self.query.dtype, device=self.query.device),
            torch.full((self.num_partials, heads, dim), NAN, device=self.query.device),
            torch.full((self.num_partials, heads), NAN, device=self.query.device),
        )


def make_tree(
    seed: int,
    *,
    levels: list[tuple[int, int]],
    dtype: torch.dtype = torch.float32,
    cache_dtype: torch.dtype | None = None,
    heads: int = 4,
    kv_heads: int = 2,
    key_dim: int = 64,
    value_dim: int = 64,
    block_size: int = 16,
    tile_rows: int = 16,
    split: int = 48,
    padding: int = 0,
) -> Case:
    """A tree whose level i has so many nodes of up to so many tokens; the last level's are private tails.

    Args:
        levels: ``(nodes, tokens at most)``, from the root down; the last one's nodes are the sequences.
        tile_rows: of the shared nodes' items; tails take 16, or what the group needs.
        split: shared nodes longer than this become several items.
        padding: rows at position -1 after the sequences, and as many empty items.
    """
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    num_sequences = levels[-1][0]
    blocks_of = [-(-tokens // block_size) for _, tokens in levels]
    num_blocks = sum(count * blocks for (count, _), blocks in zip(levels, blocks_of, strict=True)) + 3
    free = list(range(num_blocks))
    rng.shuffle(free)
    cache_dtype = cache_dtype or dtype
    key_cache = torch.full((num_blocks, block_size, kv_heads, key_dim), NAN).to(cache_dtype)
    value_cache = torch.full((num_blocks, block_size, kv_heads, value_dim), NAN).to(cache_dtype)
    tables = torch.full((num_sequences + padding, sum(blocks_of)), -1, dtype=torch.int32)
    lengths = [0] * num_sequences
    group = heads // kv_heads
    items: dict[int, list[list[int]]] = {}
    rows_partials: list[list[int]] = [[] for _ in range(num_sequences + padding)]
    num_partials = 0
    for level, (count, most) in enumerate(levels):
        for node in range(count):
            rows = [r for r in range(num_sequences) if r * count // num_sequences == node]
            private = count == num_sequences and level == len(levels) - 1
            tokens = rng.randint(1, most) if private else rng.randint(1, most // block_size) * block_size
            blocks = [free.pop() for _ in range(-(-tokens // block_size))]
            for offset in range(tokens):
                slot = blocks[offset // block_size], offset % block_size
                key_cache[slot] = torch.randn(kv_heads, key_dim, generator=generator).to(cache_dtype)
                value_cache[slot] = torch.randn(kv_heads, value_dim, generator=generator).to(cache_dtype)
            begin = lengths[rows[0]]
            for row in rows:
                first = begin // block_size
                tables[row, first : first + len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
                lengths[row] += tokens
            tile = next(t for t in (16, 64, 128) if t >= (group if private else max(tile_rows, group)))
            pieces = max(1, -(-tokens // split))
            piece = -(-tokens // pieces // block_size) * block_size
            borders = list(range(begin, begin + tokens, max(piece, block_size)))
            single = private and len(levels) == 1 and len(borders) == 1
            for start in borders:
                last = start == borders[-1]
                stop = OPEN_END if private and last else begin + tokens if last else start + max(piece, block_size)
                for at in range(0, len(rows), tile // group):
                    part = rows[at : at + tile // group]
                    if single:
                        items.setdefault(tile, []).append([part[0], 1, rows[0], start, stop, NO_PARTIAL])
                        continue
                    items.setdefault(tile, []).append([part[0], len(part), rows[0], start, stop, num_partials])
                    for row in part:
                        rows_partials[row].append(num_partials)
                        num_partials += 1
    for rows_of_tile in items.values():
        rows_of_tile.extend([[0, 0, 0, 0, 0, 0]] * padding)
    starts = [0]
    for own in rows_partials:
        starts.append(starts[-1] + len(own))
    return Case(
        query=torch.randn(num_sequences + padding, heads, key_dim, generator=generator).to(dtype),
        key_cache=key_cache,
        value_cache=value_cache,
        tables=tables,
        positions=torch.tensor([length - 1 for length in lengths] + [-1] * padding, dtype=torch.int32),
        items={tile: torch.tensor(rows, dtype=torch.int32) for tile, rows in items.items()},
        starts=torch.tensor(starts, dtype=torch.int32),
        partials=torch.tensor([p for own in rows_partials for p in own], dtype=torch.int32),
        num_partials=num_partials,
    )


def relative_error(result: torch.Tensor, truth: torch.Tensor) -> float:
    """``|result - truth| / |truth|``; a NaN anywhere makes it NaN, which no bound admits."""
    return float((result.double() - truth.double()).norm() / truth.double().norm().clamp_min(1e-30))
