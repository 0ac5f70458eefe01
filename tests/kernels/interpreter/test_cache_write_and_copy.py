"""Writing and copying blocks in the interpreter: exactly what the reference writes, and nothing beside it."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv_kernels import BlockCopier, reference, write_cache


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal bit for bit, poison included."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("block_size", "key_dim", "value_dim"), [(16, 64, 64), (32, 80, 40), (64, 192, 128)])
def test_tokens_land_in_their_slots(dtype: torch.dtype, block_size: int, key_dim: int, value_dim: int) -> None:
    rng = random.Random(0)
    tokens, heads, blocks = 37, 3, 5
    # The model's layout: heads outside tokens, so neither is contiguous as [tokens, heads, dim].
    key = torch.randn(heads, tokens, key_dim).to(dtype).transpose(0, 1)
    value = torch.randn(heads, tokens, value_dim).to(dtype).transpose(0, 1)
    slots = torch.tensor(rng.sample(range(blocks * block_size), tokens))
    slots[5] = -1
    caches = [torch.full((blocks, block_size, heads, dim), float("nan")).to(dtype) for dim in (key_dim, value_dim)]
    truth = [cache.clone() for cache in caches]
    write_cache(key, value, *caches, slots)
    reference.write_cache(key, value, *truth, slots)
    assert all(same(cache, expected) for cache, expected in zip(caches, truth, strict=True))


def test_float8_is_scaled_and_clamped() -> None:
    """On values that float8 holds exactly: the interpreter does not round the others as a GPU does."""
    exact = torch.tensor([0.5, 1.0, -3.5, 28.0, 448.0, -1000.0]).repeat(32)[: 2 * 64].view(1, 2, 64)
    scales = torch.tensor([2.0, 0.5])
    key, value = exact * scales[:, None], -exact * scales[:, None]
    caches = [torch.zeros(2, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    truth = [cache.clone() for cache in caches]
    slots = torch.tensor([20])
    write_cache(key, value, *caches, slots, key_scales=scales, value_scales=scales)
    reference.write_cache(key, value, *truth, slots, key_scales=scales, value_scales=scales)
    assert all(same(cache, expected) for cache, expected in zip(caches, truth, strict=True))
    assert float(caches[0].float().max()) == 448.0


copies = st.lists(
    st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 16)).filter(lambda copy: copy[0] != copy[1]),
    max_size=6,
)


@settings(max_examples=25, deadline=None)
@given(copies=copies, seed=st.integers(0, 3))
def test_copies_happen_as_if_one_after_another(copies: list[tuple[int, int, int]], seed: int) -> None:
    """Also where one reads what an earlier one wrote, or overwrites what an earlier one reads."""
    torch.manual_seed(seed)
    shapes = [(2, 64), (2, 64), (1, 128), (1, 32)]
    dtype = [torch.bfloat16, torch.float32, torch.float8_e4m3fn][seed % 3]
    caches = [torch.randn(6, 16, heads, dim).to(dtype) for heads, dim in shapes]
    truth = [cache.clone() for cache in caches]
    BlockCopier(caches).copy(copies)
    reference.copy_blocks(truth, copies)
    assert all(same(cache, expected) for cache, expected in zip(caches, truth, strict=True))
