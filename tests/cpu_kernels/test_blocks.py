"""Products with GGUF blocks: the blocks stand for what the `gguf` package says, and products are those of these weights."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import each_variant, use
from support.gguf_files import random_blocks
from support.packed_products import assert_is_product
from torch.nn import functional

from radixkv.model.gguf.blocks import KINDS, dequantise, unpack
from radixkv_cpu import Blocks, BlockWeight, PackedWeight, library

each_kind = pytest.mark.parametrize("kind", KINDS)
needs_library = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


@each_kind
@settings(max_examples=20, deadline=None)
@given(rows=st.integers(1, 5), blocks=st.integers(1, 3), seed=st.integers(0, 2**32 - 1))
def test_what_is_taken_apart_stands_for_the_same_weights(kind: str, rows: int, blocks: int, seed: int) -> None:
    """To the last bit, for blocks of random bytes."""
    raw = random_blocks(kind, rows, 256 * blocks, np.random.default_rng(seed))
    expected = gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind])
    assert np.array_equal(unpack(raw, kind).dequantise().numpy(), expected)


def test_a_scale_whose_eightfold_is_no_float16() -> None:
    raw = torch.zeros(1, 18, dtype=torch.uint8)
    raw[0, :2] = torch.tensor([9000.0], dtype=torch.float16).view(torch.uint8)
    assert torch.equal(unpack(raw, "Q4_0").dequantise(), torch.full((1, 32), -72000.0))


@each_variant
@settings(max_examples=25, deadline=None)
@given(
    kinds=st.lists(st.sampled_from([*KINDS]), min_size=1, max_size=3),
    is_mixed=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=st.one_of(st.integers(1, 6), st.sampled_from([13, 70])),
    features=st.integers(1, 70),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_gguf_blocks_equal_float64(
    variant: str, kinds: list[str], is_mixed: bool, dtype: torch.dtype, rows: int, features: int, seed: int
) -> None:
    """With one or several weights, of one kind or several."""
    generator = np.random.default_rng(seed)
    torch.manual_seed(seed)
    raws = [(random_blocks(kind, features, 512, generator), kind) for kind in (kinds if is_mixed else kinds[:1] * 2)]
    x, biases = torch.randn(rows, 512).to(dtype), [torch.randn(features).to(dtype) for _ in raws]
    with use(variant):
        weight = BlockWeight([unpack(*raw) for raw in raws], dtype, biases)
        product = weight.multiply(x)
    weights = [dequantise(*raw) for raw in raws]
    if dtype == torch.bfloat16:  # ties away from zero
        weights = [((part.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32) for part in weights]
    assert_is_product(product, x, weights, biases)


@each_variant
@each_kind
def test_in_float32_products_with_many_rows_are_those_of_packed_weights(variant: str, kind: str) -> None:
    """Bit by bit: they come from the same code, and the weights are the same."""
    generator = np.random.default_rng(0)
    torch.manual_seed(0)
    raws = [random_blocks(kind, 70, 768, generator) for _ in range(2)]
    x = torch.randn(50, 768)
    with use(variant):
        for activation in (None, "silu"):
            kept = BlockWeight([unpack(raw, kind) for raw in raws], torch.float32, activation=activation)
            packed = PackedWeight([dequantise(raw, kind) for raw in raws], activation=activation)
            assert torch.equal(kept.multiply(x), packed.multiply(x))


@needs_library
@pytest.mark.parametrize("kinds", [[kind] for kind in KINDS] + [["Q4_K", "Q6_K"]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_weights(kinds: list[str], dtype: torch.dtype) -> None:
    raws = [(random_blocks(kind, 75, 512, np.random.default_rng(1)), kind) for kind in kinds]
    weight = BlockWeight([unpack(*raw) for raw in raws], dtype)
    table = torch.cat([dequantise(*raw) for raw in raws]).to(dtype)
    numbers = torch.tensor([[0, 74, 31], [32, 33, len(table) - 1]])
    assert torch.equal(weight.rows(numbers), functional.embedding(numbers, table))
    with pytest.raises(IndexError, match=f"features: expected numbers from 0 to {len(table) - 1}"):
        weight.rows(torch.tensor([len(table)]))


def scaled(integer: torch.dtype, features: int, inputs: int) -> Blocks:
    """Random bytes without NaN, with float32 scales that no other type can represent."""
    codes = torch.randint(0, 256, (features, inputs), dtype=torch.uint8)
    if integer == torch.float8_e4m3fn:
        codes[codes & 127 == 127] = 0
    return Blocks(8, codes.view(integer), torch.rand(features, inputs // 32) / 100, None)


@each_variant
@pytest.mark.parametrize("integer", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_integers_and_float8_by_scales_in_float32(variant: str, integer: torch.dtype, dtype: torch.dtype) -> None:
    """All codes, the smallest among them, in products of few rows and of many, and one by one."""
    torch.manual_seed(0)
    parts = [scaled(integer, 70, 512) for _ in range(2)]
    weights = torch.cat([part.dequantise() for part in parts])
    with use(variant):
        kept = BlockWeight(parts, dtype)
        assert kept.nbytes == kept.panels.shape[0] * 32 * 512 * 9 // 8
        rounded = weights.to(dtype)
        numbers = torch.arange(140)
        assert torch.equal(kept.rows(numbers), rounded)
        if dtype == torch.bfloat16:  # ties away from zero
            weights = ((weights.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
        for rows in (1, 3, 50):
            x = torch.randn(rows, 512).to(dtype)
            assert_is_product(kept.multiply(x), x, [weights], [None])
        packed = PackedWeight([weights.to(dtype)])
        assert torch.equal(kept.multiply(x), packed.multiply(x))


@needs_library
def test_the_smallest_format_that_holds_all() -> None:
    """Blocks of 4 bits stay as they are beside others of 4 bits; whole numbers and float8 have no format in common."""
    raws = {kind: unpack(random_blocks(kind, 32, 256, np.random.default_rng(0)), kind) for kind in KINDS}
    sizes = {
        ("Q4_0", "Q4_1"): 5,
        ("Q4_0", "Q4_K"): 6,
        ("Q8_0", "Q8_0"): 8.5,
        ("Q8_0", "Q4_0"): 12,
        ("Q4_K", "Q6_K"): 12,
    }
    for kinds, bits in sizes.items():
        weight = BlockWeight([raws[kind] for kind in kinds], torch.float32)
        assert 8 * weight.nbytes == bits * 2 * 32 * 256
        table = torch.cat([raws[kind].dequantise() for kind in kinds])
        assert torch.equal(weight.rows(torch.arange(64)), table)
    with pytest.raises(ValueError, match="blocks: expected integers of 4 or 8 bits, or float8"):
        BlockWeight([raws["Q8_0"], scaled(torch.float8_e4m3fn, 32, 256)], torch.float32)


@needs_library
def test_bad_weights_are_refused() -> None:
    blocks = unpack(random_blocks("Q8_0", 4, 64, np.random.default_rng(0)), "Q8_0")
    with pytest.raises(ValueError, match="weights: expected float32, or bfloat16"):
        BlockWeight([blocks], torch.float16)
    with pytest.raises(ValueError, match=r"weights\[1\]: expected shape \[any, 64\], got \[4, 32\]"):
        BlockWeight([blocks, unpack(random_blocks("Q8_0", 4, 32, np.random.default_rng(0)), "Q8_0")], torch.float32)
    with pytest.raises(ValueError, match="rows: the weights of a gated product"):
        BlockWeight([blocks, blocks], torch.float32, activation="silu").rows(torch.tensor([0]))


BAD_NUMBERS: dict[str, tuple[torch.Tensor, torch.Tensor | None, str]] = {
    "type": (torch.ones(4, 2, dtype=torch.bfloat16), None, "scales: expected float16 or float32, got bfloat16"),
    "features": (torch.ones(3, 2), None, r"scales: expected shape \[4, any\], got \[3, 2\]"),
    "rank": (torch.ones(4), None, r"scales: expected shape \[4, any\], got \[4\]"),
    "inputs": (torch.ones(4, 3), None, r"scales: expected one for 32 or 16 of 64 inputs each, got \[4, 3\]"),
    "device": (torch.ones(4, 2, device="meta"), None, "scales: expected on cpu, got meta"),
    "shape of centres": (torch.ones(4, 2), torch.ones(4, 4), r"centres: expected shape \[4, 2\], got \[4, 4\]"),
    "type of centres": (torch.ones(4, 2), torch.ones(4, 2).half(), "centres: expected float32, got float16"),
}


@needs_library
@pytest.mark.parametrize(("scales", "centres", "message"), BAD_NUMBERS.values(), ids=BAD_NUMBERS)
def test_scales_and_centres_that_are_not_the_blocks(
    scales: torch.Tensor, centres: torch.Tensor | None, message: str
) -> None:
    integers = torch.ones(4, 64, dtype=torch.int8)
    good = Blocks(8, integers, torch.ones(4, 4), torch.zeros(4, 4))
    assert torch.equal(BlockWeight([good], torch.float32).rows(torch.arange(4)), integers.float())
    with pytest.raises(ValueError, match=rf"blocks\[1\]\.{message}"):
        BlockWeight([good, Blocks(8, integers, scales, centres)], torch.float32)
