"""Random trees of sequences over one pool, and a backend's answer held against attention written out in float64."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from support.poisoned_pool import poison

from radixkv.attention import AttentionBackend, AttentionOptions, NewTokens, QueryBatch
from radixkv.memory import Fp8KVPool, KVPool, KVScales, LayerShape
from radixkv.memory.fp8_kv_pool import FP8


class Table:
    """A block table as far as attention reads it."""

    def __init__(self, block_ids: Iterable[int]) -> None:
        self.block_ids: NDArray[np.int32] = np.fromiter(block_ids, np.int32)
        self.version = 0


@dataclass(frozen=True)
class Chunk:
    """One sequence's share of a batch."""

    table: Table
    num_context: int
    num_new: int


def query_batch(chunks: Sequence[Chunk]) -> QueryBatch:
    """The chunks, column by column."""
    columns = ([getattr(chunk, name) for chunk in chunks] for name in ("num_context", "num_new"))
    return QueryBatch([chunk.table for chunk in chunks], *(np.array(column, dtype=np.int64) for column in columns))


def shared_chunks(num_rows: int, levels: list[tuple[int, int]]) -> list[Chunk]:
    """Decoding under nodes of ``(how many, blocks each)`` per level; new sequences at each call."""
    numbers = itertools.count()
    nodes = [[[next(numbers) for _ in range(blocks)] for _ in range(count)] for count, blocks in levels]
    chunks = []
    for row in range(num_rows):
        path = [block for level in nodes for block in level[row * len(level) // num_rows]]
        chunks.append(Chunk(Table([*path, next(numbers)]), len(path) * 16, 1))
    return chunks


@dataclass
class Batch:
    """Sequences over one pool, with the keys and values of every position written out beside it."""

    chunks: list[Chunk]
    keys: list[torch.Tensor]  # [tokens, kv heads, dim] of each sequence, new tokens included
    values: list[torch.Tensor]
    pool: KVPool


def make_pool(shape: LayerShape, num_blocks: int, block_size: int, fp8: bool) -> KVPool:
    """One layer in float32, or in float8 with scales that differ from head to head."""
    if not fp8:
        return KVPool([shape], num_blocks, block_size, torch.float32)
    scales = torch.exp2(torch.arange(shape.num_kv_heads) - 3.0)
    return Fp8KVPool([shape], num_blocks, block_size, KVScales([scales], [4 / scales]), torch.float32)


def random_tokens(pool: KVPool, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, ``[tokens, heads, dim]``, that the pool holds exactly: the interpreter rounds float8 its own way."""
    shape = pool.layers[0]
    tokens = []
    for dim, scale in zip((shape.key_dim, shape.value_dim), pool.scales(0), strict=True):
        numbers = torch.randn(count, shape.num_kv_heads, dim)
        tokens.append(numbers if scale is None else (numbers / scale[:, None]).to(FP8).float() * scale[:, None])
    return tokens[0], tokens[1]


def make_batch(
    rng: random.Random, shape: LayerShape, block_size: int, num_sequences: int, max_tokens: int, fp8: bool = False
) -> Batch:
    """Sequences that branch off one another at block borders; blocks scattered, unwritten memory poisoned with NaN."""
    num_blocks = num_sequences * (2 * max_tokens // block_size + 4)
    pool = make_pool(shape, num_blocks, block_size, fp8)
    poison(pool, range(num_blocks))
    free = list(range(num_blocks))
    if rng.random() < 0.5:
        rng.shuffle(free)
    chunks: list[Chunk] = []
    keys: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    for _ in range(num_sequences):
        shared = 0
        blocks: list[int] = []
        key, value = (
            torch.empty(0, shape.num_kv_heads, shape.key_dim),
            torch.empty(0, shape.num_kv_heads, shape.value_dim),
        )
        if chunks and rng.random() < 0.7:
            parent = rng.randrange(len(chunks))
            shared = rng.randint(0, chunks[parent].num_context // block_size)
            blocks = chunks[parent].table.block_ids[:shared].tolist()
            key, value = keys[parent][: shared * block_size], values[parent][: shared * block_size]
        num_context = shared * block_size + rng.randint(0, max_tokens)
        num_new = 1 if rng.random() < 0.5 else rng.randint(1, max_tokens)
        total = num_context + num_new
        while len(blocks) * block_size < total:
            blocks.append(free.pop(0))
        extra = total - shared * block_size
        more_key, more_value = random_tokens(pool, extra)
        key, value = torch.cat([key, more_key]), torch.cat([value, more_value])
        old = np.arange(shared * block_size, num_context)
        slots = np.array(blocks)[old // block_size] * block_size + old % block_size
        pool.write(0, torch.from_numpy(slots), key[old], value[old])
        chunks.append(Chunk(Table(blocks), num_context, num_new))
        keys.append(key)
        values.append(value)
    return Batch(chunks, keys, values, pool)


def reference(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    first_position: int,
    scale: float,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """``query`` [rows, heads, dim] over the whole sequence, in float64."""
    query, key, value = query.double(), key.double(), value.double()
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("rhd,khd->hrk", query, key.repeat_interleave(group, 1)) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    rows = torch.arange(first_position, first_position + query.shape[0])[:, None]
    columns = torch.arange(key.shape[0])[None, :]
    visible = columns <= rows
    if window is not None:
        visible &= columns > rows - window
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.double().view(-1, 1, 1).expand(-1, query.shape[0], 1)], dim=-1)
    weights = scores.softmax(-1)[..., : key.shape[0]]
    return torch.einsum("hrk,khd->rhd", weights, value.repeat_interleave(group, 1))


def check(
    batch: Batch,
    backend: AttentionBackend,
    group: int,
    softcap: float | None = None,
    window: int | None = None,
    with_sinks: bool = False,
) -> None:
    """One layer's attention over the batch's new tokens equals the reference's, row by row."""
    shape = batch.pool.layers[0]
    num_heads, scale = shape.num_kv_heads * group, 0.7 * shape.key_dim**-0.5
    plan = backend.prepare(query_batch(batch.chunks))
    queries = [torch.randn(chunk.num_new, num_heads, shape.key_dim) for chunk in batch.chunks]
    sinks = torch.randn(num_heads) if with_sinks else None
    news = [slice(chunk.num_context, None) for chunk in batch.chunks]
    new = NewTokens(
        torch.cat([queries[i] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.keys[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.values[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
    )
    output = plan.attend(0, new, AttentionOptions(scale, softcap, window, sinks))
    assert output.shape == (1, plan.row_starts[-1], num_heads, shape.value_dim)
    for position, index in enumerate(plan.order):
        expected = reference(
            queries[index],
            batch.keys[index],
            batch.values[index],
            batch.chunks[index].num_context,
            scale,
            softcap,
            window,
            sinks,
        )
        got = output[0, plan.row_starts[position] : plan.row_starts[position + 1]].double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@dataclass(frozen=True)
class Case:
    """A random batch, and the options of a layer that attends over it."""

    seed: int
    block_size: int
    num_sequences: int
    max_tokens: int
    shape: LayerShape
    group: int
    softcap: float | None
    window: int | None
    with_sinks: bool

    def batch(self, fp8: bool = False) -> Batch:
        torch.manual_seed(self.seed)
        rng = random.Random(self.seed)
        return make_batch(rng, self.shape, self.block_size, self.num_sequences, self.max_tokens, fp8)

    def check(self, batch: Batch, backend: AttentionBackend) -> None:
        check(batch, backend, self.group, self.softcap, self.window, self.with_sinks)


cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    block_size=st.sampled_from([1, 3, 16]),
    num_sequences=st.integers(1, 7),
    max_tokens=st.sampled_from([3, 20, 70]),
    shape=st.builds(LayerShape, st.sampled_from([1, 2]), st.just(8), st.sampled_from([8, 12])),
    group=st.sampled_from([1, 3]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 7, 40]),
    with_sinks=st.booleans(),
)


def check_cuts(backend: AttentionBackend, pool: KVPool) -> None:
    """What a prompt's tokens see of each other does not depend on how it is cut into chunks, rounded numbers or not."""
    shape, group, length = pool.layers[0], 2, 50
    table = Table(range(pool.num_blocks))
    query = torch.randn(1, shape.num_kv_heads * group, length, shape.key_dim)
    key, value = (torch.randn(1, shape.num_kv_heads, length, dim) for dim in (shape.key_dim, shape.value_dim))
    outputs = []
    for borders in ([0, length], [0, 1, 17, 18, 32, 49, length]):
        parts = []
        for start, stop in itertools.pairwise(borders):
            batch = backend.prepare(query_batch([Chunk(table, start, stop - start)]))
            new = [tensor[:, :, start:stop] for tensor in (query, key, value)]
            parts.append(batch.attend(0, NewTokens(*new), AttentionOptions(0.3)))
        outputs.append(torch.cat(parts, dim=1))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
