"""Random trees of sequences over one pool, and a backend's answer held against attention written out in float64."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import torch

from radixkv.attention import AttentionBackend, QueryChunk
from radixkv.memory import KVPool, LayerShape


@dataclass
class Batch:
    """Sequences over one pool, with the keys and values of every position written out beside it."""

    chunks: list[QueryChunk]
    keys: list[torch.Tensor]  # [tokens, kv heads, dim] of each sequence, new tokens included
    values: list[torch.Tensor]
    pool: KVPool


def make_batch(rng: random.Random, shape: LayerShape, block_size: int, num_sequences: int, max_tokens: int) -> Batch:
    """Sequences that branch off one another at block borders; blocks scattered, unwritten memory poisoned with NaN."""
    num_blocks = num_sequences * (2 * max_tokens // block_size + 4)
    pool = KVPool([shape], num_blocks, block_size, torch.float32)
    pool.poison(range(num_blocks))
    free = list(range(num_blocks))
    if rng.random() < 0.5:
        rng.shuffle(free)
    chunks: list[QueryChunk] = []
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
            blocks = chunks[parent].block_ids[:shared].tolist()
            key, value = keys[parent][: shared * block_size], values[parent][: shared * block_size]
        num_context = shared * block_size + rng.randint(0, max_tokens)
        num_new = 1 if rng.random() < 0.5 else rng.randint(1, max_tokens)
        total = num_context + num_new
        while len(blocks) * block_size < total:
            blocks.append(free.pop(0))
        extra = total - shared * block_size
        key = torch.cat([key, torch.randn(extra, shape.num_kv_heads, shape.key_dim)])
        value = torch.cat([value, torch.randn(extra, shape.num_kv_heads, shape.value_dim)])
        for position in range(shared * block_size, num_context):
            slot = blocks[position // block_size] * block_size + position % block_size
            pool.key_rows[0][slot], pool.value_rows[0][slot] = key[position], value[position]
        chunks.append(QueryChunk(np.array(blocks, dtype=np.int32), num_context, num_new, owner=len(chunks)))
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
    plan = backend.prepare(batch.chunks)
    queries = [torch.randn(chunk.num_new, num_heads, shape.key_dim) for chunk in batch.chunks]
    sinks = torch.randn(num_heads) if with_sinks else None
    news = [slice(chunk.num_context, None) for chunk in batch.chunks]
    output = plan.attend(
        0,
        torch.cat([queries[i] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.keys[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.values[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        scale=scale,
        softcap=softcap,
        sliding_window=window,
        sinks=sinks,
    )
    assert output.shape == (1, plan.row_starts[-1], num_heads, shape.value_dim)
    for place, index in enumerate(plan.order):
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
        got = output[0, plan.row_starts[place] : plan.row_starts[place + 1]].double()
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
