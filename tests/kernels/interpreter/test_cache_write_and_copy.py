"""Writing and copying blocks in the interpreter: exactly what the reference writes, and nothing else."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from radixkv_kernels import BlockCopier, reference, rotate_and_write, write_cache


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim", "rotary_dim"),
    [(6, 2, 64, 64, 64), (3, 3, 80, 40, 32), (4, 1, 96, 24, 96)],
)
def test_queries_and_keys_are_rotated_and_written(
    dtype: torch.dtype, heads: int, kv_heads: int, key_dim: int, value_dim: int, rotary_dim: int
) -> None:
    """Also with padding, whose key is not stored, and in the model's layout, with heads outside tokens."""
    tokens, blocks, block_size = 21, 4, 16
    query, key, value = (
        torch.randn(count, tokens, dim).to(dtype).transpose(0, 1)
        for count, dim in ((heads, key_dim), (kv_heads, key_dim), (kv_heads, value_dim))
    )
    angles = torch.randn(tokens, rotary_dim // 2) * 30
    cosines, sines = (torch.cat((part, part), -1) for part in (angles.cos(), angles.sin()))
    slots = torch.randperm(blocks * block_size)[:tokens]
    slots[5] = -1
    caches = [torch.full((blocks, block_size, kv_heads, dim), float("nan")).to(dtype) for dim in (key_dim, value_dim)]
    truth, query_before, key_before = [cache.clone() for cache in caches], query.clone(), key.clone()
    rotated, true_rotated = (query.new_full((tokens, heads, key_dim), float("nan")) for _ in range(2))
    rotate_and_write(query, key, value, cosines, sines, *caches, slots, rotated)
    reference.rotate_and_write(query, key, value, cosines, sines, *truth, slots, true_rotated)
    bound = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]
    torch.testing.assert_close(rotated, true_rotated, rtol=bound, atol=bound)
    torch.testing.assert_close(caches[0], truth[0], rtol=bound, atol=bound, equal_nan=True)
    assert same(caches[1], truth[1])
    assert same(query, query_before)
    assert same(key, key_before)
    assert int(caches[0].isnan().any(-1).any(-1).sum()) == blocks * block_size - tokens + 1


def test_rotated_keys_in_float8_are_those_of_rotating_and_writing_apart() -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 2, 64), torch.randn(3, 2, 64), torch.randn(3, 2, 64)
    angles, slots = torch.randn(3, 64), torch.tensor([3, -1, 17])
    ours, apart = ([torch.zeros(2, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)] for _ in range(2))
    options = {"key_scales": torch.tensor([2.0, 0.5]), "value_scales": torch.tensor([0.25, 4.0])}
    rotated = key * angles.cos()[:, None] + torch.cat((-key[..., 32:], key[..., :32]), -1) * angles.sin()[:, None]
    write_cache(rotated, value, *apart, slots, **options)
    rotate_and_write(query, key, value, angles.cos(), angles.sin(), *ours, slots, torch.empty_like(query), **options)
    for cache, expected in zip(ours, apart, strict=True):
        # Sums rounded in another order may fall on the other side of a rounding border.
        assert (cache.float() != expected.float()).float().mean() < 0.01


def test_rotations_that_fit_no_head_are_refused() -> None:
    query, cache, slots = torch.zeros(3, 2, 64), torch.zeros(2, 16, 2, 64), torch.zeros(3, dtype=torch.int64)
    for size in (0, 33, 66):
        angles = torch.zeros(3, size)
        with pytest.raises(
            ValueError, match=rf"cosines: expected an even number of 2 to 64 dimensions, got \[3, {size}\]"
        ):
            rotate_and_write(query, query.clone(), query, angles, angles, cache, cache.clone(), slots, query.clone())


def test_float8_is_scaled_and_clamped() -> None:
    """On values that float8 holds exactly: the interpreter does not round the others as a GPU does."""
    exact = torch.tensor([0.5, 1.0, -3.5, 28.0, 448.0, -1000.0]).repeat(32)[: 2 * 64].view(1, 2, 64)
    key_scales, value_scales = torch.tensor([2.0, 0.5]), torch.tensor([0.25, 4.0])
    key, value = exact * key_scales[:, None], -exact * value_scales[:, None]
    caches = [torch.zeros(2, 16, 2, 64).to(torch.float8_e4m3fn) for _ in range(2)]
    truth = [cache.clone() for cache in caches]
    slots = torch.tensor([20])
    write_cache(key, value, *caches, slots, key_scales=key_scales, value_scales=value_scales)
    reference.write_cache(key, value, *truth, slots, key_scales=key_scales, value_scales=value_scales)
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
