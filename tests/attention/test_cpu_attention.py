"""The CPU backend against attention written out in float64, on random trees of sequences."""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv.attention import QueryChunk, build_plan, cost_model
from radixkv.attention.cpu_backend import CpuAttention
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
        chunks.append(QueryChunk(np.array(blocks, dtype=np.int32), num_context, num_new))
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


def check(batch: Batch, group: int, softcap: float | None, window: int | None, with_sinks: bool) -> None:
    shape = batch.pool.layers[0]
    num_heads, scale = shape.num_kv_heads * group, 0.7 * shape.key_dim**-0.5
    plan = build_plan(batch.chunks, batch.pool.block_size)
    queries = [torch.randn(chunk.num_new, num_heads, shape.key_dim) for chunk in batch.chunks]
    sinks = torch.randn(num_heads) if with_sinks else None
    news = [slice(chunk.num_context, None) for chunk in batch.chunks]
    output = CpuAttention(plan, batch.pool).attend(
        0,
        torch.cat([queries[i] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.keys[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        torch.cat([batch.values[i][news[i]] for i in plan.order]).transpose(0, 1).unsqueeze(0),
        scale=scale,
        softcap=softcap,
        sliding_window=window,
        sinks=sinks,
    )
    assert output.shape == (1, plan.num_rows, num_heads, shape.value_dim)
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


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    block_size=st.sampled_from([1, 3, 16]),
    num_sequences=st.integers(1, 7),
    max_tokens=st.sampled_from([3, 20, 70]),
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    value_dim=st.sampled_from([8, 12]),
    softcap=st.sampled_from([None, 2.0]),
    window=st.sampled_from([None, 1, 7, 40]),
    with_sinks=st.booleans(),
    share_from=st.sampled_from([1, 40]),
    view_from=st.sampled_from([1, 30, 10_000]),
)
def test_every_row_attends_to_exactly_its_own_tokens(
    seed: int,
    block_size: int,
    num_sequences: int,
    max_tokens: int,
    kv_heads: int,
    group: int,
    value_dim: int,
    softcap: float | None,
    window: int | None,
    with_sinks: bool,
    share_from: int,
    view_from: int,
) -> None:
    torch.manual_seed(seed)
    batch = make_batch(random.Random(seed), LayerShape(kv_heads, 8, value_dim), block_size, num_sequences, max_tokens)
    with pytest.MonkeyPatch.context() as patch:
        # Small thresholds, so that small batches take the paths that large ones do.
        patch.setattr(cost_model, "MIN_SAVED_TOKENS", share_from)
        patch.setattr(cost_model, "MIN_VIEW_TOKENS", view_from)
        check(batch, group, softcap, window, with_sinks)


def test_a_shared_prefix_is_read_once() -> None:
    prefix = np.arange(64, dtype=np.int32)
    chunks = [QueryChunk(np.append(prefix, np.int32(100 + i)), 64 * 16, 1) for i in range(8)]
    plan = build_plan(chunks, 16)
    assert plan.num_keys_read == 64 * 16 + 8 * 1
    assert plan.items[0].num_rows == 8


def test_bfloat16_follows_float32() -> None:
    torch.manual_seed(0)
    shape = LayerShape(2, 16, 16)
    table = np.arange(8, dtype=np.int32)
    query, key, value = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        pool = KVPool([shape], 8, 16, dtype)
        for start, stop in ((0, 30), (30, 49), (49, 50)):
            attention = CpuAttention(build_plan([QueryChunk(table, start, stop - start)], 16), pool)
            part = [tensor[:, :, start:stop].to(dtype) for tensor in (query, key, value)]
            output = attention.attend(0, *part, scale=0.25)
        assert output.dtype == dtype
        outputs.append(output.float())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0.05, atol=0.05)
