"""Random batches for `radixkv_cpu.PagedAttention`, without a planner: which ranges there are is random, too."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from support.attention_batches import reference

from radixkv_cpu import PagedAttention, RowKind


@dataclass
class PagedBatch:
    """Sequences with a common prefix, their rows one after another.

    Attributes:
        ranges: (first row, past the last row, table, first key, past the last key) of each.
        block_ids: of each sequence; unused entries name a block that holds only NaN.
        contexts: tokens of each sequence before its first row.
        num_rows: of each sequence.
        kinds: of each range; of one sequence's rows it may be any.
    """

    ranges: list[tuple[int, int, int, int, int]]
    block_ids: torch.Tensor
    contexts: list[int]
    num_rows: list[int]
    keys: torch.Tensor
    values: torch.Tensor
    block_size: int
    kinds: list[RowKind]

    @property
    def positions(self) -> np.ndarray:
        spans = zip(self.contexts, self.num_rows, strict=True)
        return np.concatenate([np.arange(context, context + rows) for context, rows in spans])

    def attention(self) -> PagedAttention:
        first, past, table, start, stop = np.array(self.ranges, dtype=np.int64).T
        rows, keys = np.stack((first, past)), np.stack((start, stop))
        kinds = np.array(self.kinds, dtype=np.int8)
        return PagedAttention(rows, table, keys, self.block_ids.numpy(), self.positions, self.block_size, kinds)

    def expected(self, query: torch.Tensor, magnitude: bool = False, **options: Any) -> torch.Tensor:
        """In float64; ``magnitude``: of the values' absolute values."""
        outputs, row = [], 0
        for table, context, rows in zip(self.block_ids, self.contexts, self.num_rows, strict=True):
            at = torch.arange(context + rows)
            slots = table[at // self.block_size].long() * self.block_size + at % self.block_size
            key, value = (cache.flatten(0, 1)[slots] for cache in (self.keys, self.values))
            part = query[row : row + rows]
            outputs.append(reference(part, key, value.abs() if magnitude else value, context, **options))
            row += rows
        return torch.cat(outputs)


def make_paged_batch(
    seed: int,
    *,
    dtype: torch.dtype,
    num_sequences: int,
    max_rows: int,
    max_tokens: int,
    block_size: int,
    kv_heads: int,
    key_dim: int,
    value_dim: int,
) -> PagedBatch:
    """A prefix that all share, one that the first half shares below it, and private tails, each cut in two at random."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    outer = rng.randint(0, max_tokens // block_size)
    inner = outer + rng.randint(0, max_tokens // block_size // 2)
    half = (num_sequences + 1) // 2
    shared = [inner if i < half else outer for i in range(num_sequences)]
    contexts = [blocks * block_size + rng.randint(0, max_tokens) for blocks in shared]
    num_rows = [rng.choice((1, rng.randint(1, max_rows))) for _ in range(num_sequences)]
    totals = [context + rows for context, rows in zip(contexts, num_rows, strict=True)]
    lengths = [-(-total // block_size) for total in totals]
    unused = inner + sum(lengths)
    ids = list(range(unused))
    rng.shuffle(ids)
    width = max(lengths) + rng.randint(0, 3)
    block_ids = torch.full((num_sequences, width), unused, dtype=torch.int32)
    prefix = [ids.pop() for _ in range(inner)]
    written = torch.zeros(unused + 1, block_size, dtype=torch.bool)
    for table, common, length, total in zip(block_ids, shared, lengths, totals, strict=True):
        table[:length] = torch.tensor(prefix[:common] + [ids.pop() for _ in range(length - common)])
        at = torch.arange(total)
        written[table[at // block_size].long(), at % block_size] = True
    caches = []
    for dim in (key_dim, value_dim):
        cache = torch.randn(unused + 1, block_size, kv_heads, dim).to(dtype)
        cache[~written] = float("nan")
        caches.append(cache)

    row_starts = np.cumsum([0, *num_rows]).tolist()
    ranges = []
    if outer:
        ranges.append((0, row_starts[-1], rng.randrange(num_sequences), 0, outer * block_size))
    if inner > outer:
        ranges.append((0, row_starts[half], rng.randrange(half), outer * block_size, inner * block_size))
    for i in range(num_sequences):
        start, stop = shared[i] * block_size, totals[i]
        cut = rng.randint(start, stop)
        ranges += [(row_starts[i], row_starts[i + 1], i, *part) for part in ((start, cut), (cut, stop))]
    rng.shuffle(ranges)
    private = {*itertools.pairwise(row_starts)}
    kinds = [rng.choice(list(RowKind)) if (first, past) in private else RowKind.SHARED for first, past, *_ in ranges]
    return PagedBatch(ranges, block_ids, contexts, num_rows, *caches, block_size, kinds)
