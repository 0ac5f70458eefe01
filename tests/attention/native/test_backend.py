"""The backend over native code against attention in float64, on random trees of sequences, and against torch's backend."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_batches import Case, Chunk, Table, cases, check_cuts, make_pool, query_batch
from support.cpu_variants import each_variant, use

from radixkv.attention import AttentionOptions, NewTokens
from radixkv.attention.native import NativeAttention, NativeBackend, is_available
from radixkv.attention.torch_cpu import TorchBackend
from radixkv.cache import BlockCopy
from radixkv.memory import KVPool, LayerShape
from radixkv_cpu import library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


@each_variant
@settings(max_examples=40, deadline=None)
@given(case=cases, share_from=st.sampled_from([1, 40]))
def test_every_row_attends_to_exactly_its_own_tokens(variant: str, case: Case, share_from: int) -> None:
    batch = case.batch()
    with use(variant), pytest.MonkeyPatch.context() as patch:
        # A small threshold, so that small batches take the path that large ones do.
        patch.setattr(NativeBackend, "sharing_cost_tokens", share_from)
        case.check(batch, NativeBackend(batch.pool, 8, 2000))


def test_new_tokens_are_attended_to_as_they_are_stored() -> None:
    torch.manual_seed(1)
    pool = make_pool(LayerShape(2, 8, 8), 4, 16, fp8=False)
    check_cuts(NativeBackend(pool, 1, 64), pool)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layers_of_any_layout_give_what_torch_gives(variant: str, dtype: torch.dtype) -> None:
    """Two layers with different heads; queries, keys and values as projections leave them, as copies, and transposed."""
    torch.manual_seed(0)
    layers = [LayerShape(2, 16, 16), LayerShape(1, 24, 8)]
    chunks = [Chunk(Table([0, 1, 2, 3]), 0, 50), Chunk(Table([0, 1, 4]), 32, 3), Chunk(Table([0, 1, 5]), 32, 1)]
    outputs = []
    for make in (NativeBackend, TorchBackend):
        torch.manual_seed(1)
        backend = make(KVPool(layers, 6, 16, dtype), 4, 64)
        with use(variant):
            results = []
            for part in ([chunks[0]], chunks[1:]):  # the prefix before what shares it
                batch = backend.prepare(query_batch(part))
                rows = int(batch.row_starts[-1])
                for layer, shape in enumerate(layers):
                    beside = torch.randn(1, rows, 6 * shape.num_kv_heads, shape.key_dim).transpose(1, 2).to(dtype)
                    query, key, _ = beside.split([4 * shape.num_kv_heads] + 2 * [shape.num_kv_heads], dim=1)
                    value = torch.randn(1, shape.num_kv_heads, shape.value_dim, rows).to(dtype).transpose(2, 3)
                    options = AttentionOptions(0.25, sinks=torch.zeros(query.shape[1], dtype=dtype))
                    results.append(batch.attend(layer, NewTokens(query, key, value), options))
                    assert results[-1].dtype == dtype
        outputs.append(results)
    # bfloat16 has 8 bits: both sides round the weights, and the result.
    bound = 1e-5 if dtype == torch.float32 else 0.03
    for native, plain in zip(*outputs, strict=True):
        torch.testing.assert_close(native.float(), plain.float().view(native.shape), rtol=bound, atol=bound)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("num_prompt", "num_drafts"), [(1, 7), (2, 16), (9, 5), (40, 16), (250, 3), (1, 32), (9, 40), (2, 100)]
)
def test_no_bit_depends_on_how_a_prompt_is_cut_nor_on_drafts(
    variant: str, dtype: torch.dtype, num_prompt: int, num_drafts: int
) -> None:
    """Few rows and many pass keys in ways that add in different orders; drafts also stand in a prompt's last chunk.

    Drafts of 32 tokens and more used to be computed as prompts are, which changed answers.
    """
    torch.manual_seed(0)
    shape, context = LayerShape(3, 64, 64), 200
    rows = num_prompt + num_drafts
    query, key, value = (torch.randn(1, heads, rows, 64).to(dtype) for heads in (9, 3, 3))
    before = torch.randn(2, 30, 16, 3, 64).to(dtype)

    def attend(chunks: list[tuple[int, int]]) -> torch.Tensor:
        pool = KVPool([shape], 30, 16, dtype)
        pool.keys[0].copy_(before[0])
        pool.values[0].copy_(before[1])
        backend = NativeBackend(pool, 1, 480)
        table, outputs, start = Table(range(30)), [], 0
        for count, num_decoding in chunks:
            batch = query_batch([Chunk(table, context + start, count)])
            part = backend.prepare(replace(batch, num_decoding=np.array([num_decoding])))
            tensors = [each[:, :, start : start + count] for each in (query, key, value)]
            outputs.append(part.attend(0, NewTokens(*tensors), AttentionOptions(0.125)))
            start += count
        return torch.cat(outputs, dim=1)

    chunks, left = [], num_prompt - 1
    for count in (1, 130, 5, 30, 100):  # rows of a prompt before its last
        chunks += [(min(count, left), 0)] if left else []
        left -= min(count, left)
    with use(variant):
        together = attend([(rows, 1 + num_drafts)])
        apart = attend([*chunks, *[(1, 1)] * (1 + num_drafts)])
    assert torch.equal(together, apart)


def test_a_layer_learns_at_which_rows_answers_go_on() -> None:
    """At a prompt's last row, or a token and drafts behind it; at none where a prompt goes on. Prefixes are shared, too."""
    chunks = [Chunk(Table([*range(64), 100 + i]), 64 * 16, count) for i, count in enumerate((4, 3, 5, 1))]
    backend = NativeBackend(KVPool([LayerShape(1, 8, 8)], 110, 16, torch.float32), 4, 2000)
    num_decoding = np.array([1, 3, 0, 1])
    batch = backend.prepare(replace(query_batch(chunks), num_decoding=num_decoding))
    assert isinstance(batch, NativeAttention)
    stops = batch.row_starts[1:]
    expected = [range(stop - num_decoding[i], stop) for i, stop in zip(batch.order, stops, strict=True)]
    assert batch.decoding.tolist() == [row for rows in expected for row in rows]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_pools_of_other_types_are_not_taken(dtype: torch.dtype) -> None:
    pool = KVPool([LayerShape(1, 8, 8)], 2, 16, dtype)
    assert not is_available(pool, dtype)
    assert not is_available(pool, torch.float32)
    assert is_available(KVPool([LayerShape(1, 8, 8)], 2, 16, torch.float32), torch.float32)
    assert not is_available(make_pool(LayerShape(1, 8, 8), 2, 16, fp8=True), torch.float32)


def test_copies_are_the_pools() -> None:
    pool = make_pool(LayerShape(1, 8, 8), 2, 4, fp8=False)
    pool.keys[0].zero_()
    pool.keys[0][0] = 1
    NativeBackend(pool, 1, 8).copy_blocks([BlockCopy(0, 1, 3)])
    assert pool.keys[0][1, :, 0, 0].tolist() == [1, 1, 1, 0]
