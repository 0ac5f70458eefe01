"""The backend over torch against attention written out in float64, on random trees of sequences."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.attention_batches import Case, Chunk, Table, cases, check_cuts, make_pool, query_batch

from radixkv.attention import AttentionOptions, NewTokens
from radixkv.attention.torch_cpu import TorchBackend, cost_model
from radixkv.memory import KVPool, LayerShape


@settings(max_examples=150, deadline=None)
@given(case=cases, share_from=st.sampled_from([1, 40]), view_from=st.sampled_from([1, 30, 10_000]), fp8=st.booleans())
def test_every_row_attends_to_exactly_its_own_tokens(case: Case, share_from: int, view_from: int, fp8: bool) -> None:
    batch = case.batch(fp8)
    with pytest.MonkeyPatch.context() as patch:
        # Small thresholds, so that small batches take the paths that large ones do.
        patch.setattr(TorchBackend, "sharing_cost_tokens", share_from)
        patch.setattr(cost_model, "MIN_VIEW_TOKENS", view_from)
        case.check(batch, TorchBackend(batch.pool, 8, 2000))


@pytest.mark.parametrize("fp8", [False, True])
def test_new_tokens_are_attended_to_as_they_are_stored(fp8: bool) -> None:
    torch.manual_seed(1)
    pool = make_pool(LayerShape(2, 8, 8), 4, 16, fp8)
    check_cuts(TorchBackend(pool, 1, 64), pool)


def test_numbers_of_a_head_that_are_not_neighbours() -> None:
    """torch's operator would read other numbers in their place."""
    torch.manual_seed(1)
    shape, count = LayerShape(2, 8, 8), 20
    query, key, value = (torch.randn(1, heads, 8, count).transpose(2, 3) for heads in (4, 2, 2))
    outputs = []
    for new in ((query, key, value), (query.contiguous(), key.contiguous(), value.contiguous())):
        batch = TorchBackend(make_pool(shape, 2, 16, fp8=False), 1, 32).prepare(
            query_batch([Chunk(Table([0, 1]), 0, count)])
        )
        outputs.append(batch.attend(0, NewTokens(*new), AttentionOptions(0.3)))
    torch.testing.assert_close(*outputs)


def test_bfloat16_follows_float32() -> None:
    torch.manual_seed(0)
    shape = LayerShape(2, 16, 16)
    table = Table(range(8))
    query, key, value = torch.randn(1, 4, 50, 16), torch.randn(1, 2, 50, 16), torch.randn(1, 2, 50, 16)
    outputs = []
    for dtype in (torch.float32, torch.bfloat16):
        backend = TorchBackend(KVPool([shape], 8, 16, dtype), 1, 128)
        for start, stop in ((0, 30), (30, 49), (49, 50)):
            attention = backend.prepare(query_batch([Chunk(table, start, stop - start)]))
            part = [tensor[:, :, start:stop].to(dtype) for tensor in (query, key, value)]
            output = attention.attend(0, NewTokens(*part), AttentionOptions(0.25))
        assert output.dtype == dtype
        outputs.append(output.float())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=0.05, atol=0.05)
