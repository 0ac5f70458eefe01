"""Norms, rotary positions and cache writes against float64, for every compiled variant, with NaN around what is written."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import each_variant, guarded, is_untouched, use

from radixkv_cpu import rms_norm, rope_, write_cache

DTYPES = st.sampled_from([torch.float32, torch.bfloat16])
DIMS = st.one_of(st.integers(1, 100), st.sampled_from([128, 256, 576]))


def assert_close(given_: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within a few roundings of float32 of ``magnitude``; in bfloat16, of 8 bits, another 2^-8 of the result."""
    bound = 1e-6 * magnitude + 1e-37
    if given_.dtype == torch.bfloat16:
        bound = bound + 2.0**-7.99 * expected.abs()
    assert ((given_.double() - expected).abs() <= bound).all()


def norm_reference(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + epsilon).sqrt() * weight.double()


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.sampled_from([0, 1, 2, 7, 40]),
    groups=st.integers(1, 4),
    dim=DIMS,
    size=st.sampled_from([1e-4, 1.0, 1e4]),
    epsilon=st.sampled_from([1e-6, 1e-5, 0.1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_rms_norm(
    variant: str, dtype: torch.dtype, rows: int, groups: int, dim: int, size: float, epsilon: float, seed: int
) -> None:
    """Into a new tensor; and in place of some heads of wider rows, where the other heads stay as they are."""
    torch.manual_seed(seed)
    wide, around = guarded((torch.randn(rows, groups + 2, dim) * size).to(dtype))
    weight = torch.randn(dim)
    part, before = wide[:, 1 : 1 + groups], wide.clone()
    expected = norm_reference(part, weight, epsilon)
    with use(variant):
        given_ = rms_norm(part, weight, epsilon)
        assert torch.equal(wide, before)
        assert rms_norm(part, weight, epsilon, out=part) is part
    assert given_.dtype == dtype
    assert torch.equal(given_, part)
    assert_close(given_, expected, expected.abs() * 3)
    assert torch.equal(wide[:, 0], before[:, 0])
    assert torch.equal(wide[:, -1], before[:, -1])
    assert is_untouched(around)


def rope_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    x, cos, sin = x.double(), cos.double()[:, None], sin.double()[:, None]
    turned, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = turned.chunk(2, dim=-1)
    return torch.cat([turned * cos + torch.cat([-high, low], dim=-1) * sin, rest], dim=-1)


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    dtype=DTYPES,
    rows=st.sampled_from([0, 1, 3, 40]),
    query_heads=st.integers(1, 5),
    kv_heads=st.integers(1, 3),
    half=st.integers(1, 70),
    unturned=st.sampled_from([0, 1, 16, 40]),
    seed=st.integers(0, 2**32 - 1),
)
def test_queries_and_keys_are_rotated_in_place_and_values_stay(
    variant: str, dtype: torch.dtype, rows: int, query_heads: int, kv_heads: int, half: int, unturned: int, seed: int
) -> None:
    """For queries and keys that lie beside values; only the first dimensions of a head where not all are rotated."""
    torch.manual_seed(seed)
    dim = 2 * half + unturned
    packed, around = guarded(torch.randn(rows, query_heads + 2 * kv_heads, dim).to(dtype))
    before = packed.clone()
    query, key, value = packed.split((query_heads, kv_heads, kv_heads), dim=1)
    # Of halves that differ, though models repeat them.
    cos, sin = (torch.randn(2 * half, rows).to(dtype).T for _ in range(2))
    expected = rope_reference(packed, cos, sin)
    magnitude = rope_reference(packed.abs(), cos.abs(), -sin.abs()).abs() + 10 * packed.double().abs().amax(-1, True)
    with use(variant):
        rope_(query, key, cos, sin)
    turned = query_heads + kv_heads
    assert_close(packed[:, :turned], expected[:, :turned], magnitude[:, :turned])
    assert torch.equal(value, before[:, turned:])
    assert torch.equal(packed[..., 2 * half :], before[..., 2 * half :])
    assert is_untouched(around)


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    rows=st.sampled_from([0, 1, 3, 40]),
    heads=st.integers(1, 4),
    key_dim=st.integers(1, 80),
    value_dim=st.integers(1, 80),
    block_size=st.sampled_from([1, 4, 16]),
    heads_first=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_write_cache(
    variant: str,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    key_dim: int,
    value_dim: int,
    block_size: int,
    heads_first: bool,
    seed: int,
) -> None:
    """Bit for bit into the slots that are named and into no others."""
    torch.manual_seed(seed)
    blocks = rows // block_size + 2
    slots = torch.randperm(blocks * block_size)[:rows]
    new, caches, arounds = [], [], []
    for dim in (key_dim, value_dim):
        # Beside each other or heads first, a part of something wider.
        wide = torch.randn(heads, rows, dim + 3).transpose(0, 1) if heads_first else torch.randn(rows, heads, dim + 3)
        new.append(wide.to(dtype)[..., 2 : 2 + dim])
        cache, around = guarded(torch.full((blocks, block_size, heads, dim), float("nan")).to(dtype))
        caches.append(cache)
        arounds.append(around)
    with use(variant):
        write_cache(*new, *caches, slots)
    for part, cache, around in zip(new, caches, arounds, strict=True):
        entries = cache.flatten(0, 1)
        assert torch.equal(entries[slots], part)
        others = torch.ones(len(entries), dtype=torch.bool)
        others[slots] = False
        assert entries[others].isnan().all()
        assert is_untouched(around)


@each_variant
def test_threads_do_not_change_a_bit(variant: str) -> None:
    """With rows enough for two threads."""
    torch.manual_seed(0)
    x, weight, positions = torch.randn(300, 6, 64), torch.randn(64), torch.randn(300, 64)
    slots = torch.randperm(304)[:300]
    results = []
    for num_threads in (1, 2):
        query, key = x.clone().split((4, 2), dim=1)
        keys, values = torch.zeros(19, 16, 2, 64), torch.zeros(19, 16, 2, 64)
        with use(variant, num_threads):
            rms_norm(query, weight, 1e-5, out=query)
            rope_(query, key, positions.cos(), positions.sin())
            write_cache(key, query[:, :2], keys, values, slots)
        results.append(torch.cat([query.flatten(), key.flatten(), keys.flatten(), values.flatten()]))
    assert torch.equal(*results)
