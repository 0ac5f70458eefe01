"""Quantised weights: no more is lost than the format must lose, and products are those of the weights that are left."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import assert_close, each_variant, use
from support.packed_products import assert_is_product
from torch.nn import functional

from radixkv_cpu import (
    QUANTIZATIONS,
    PackedWeight,
    Quantised,
    QuantisedWeight,
    dequantise,
    is_quantisable,
    library,
    quantise,
)

each_quantization = pytest.mark.parametrize("quantization", QUANTIZATIONS)
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
ROWS = st.one_of(st.integers(1, 6), st.integers(1, 100), st.sampled_from([257, 513]))
needs_library = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


def random_weight(features: int, inputs: int, dtype: torch.dtype) -> torch.Tensor:
    """Groups of many sizes, some of them of zeros."""
    sizes = torch.tensor([0.0, 1e-3, 0.1, 1.0, 1.0, 30.0])
    groups = torch.randn(features, inputs // 32, 32) * sizes[torch.randint(6, (features, inputs // 32, 1))]
    return groups.flatten(-2).to(dtype)


def kept(weight: torch.Tensor, quantization: str) -> torch.Tensor:
    """The weights that are left, in the type that products compute with."""
    return dequantise(quantise(weight, quantization), weight.dtype)


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    quantization=st.sampled_from([*QUANTIZATIONS]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    rows=ROWS,
    groups=st.one_of(st.integers(1, 5), st.sampled_from([12, 13, 25])),
    features=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    with_biases=st.lists(st.booleans(), min_size=3, max_size=3),
    with_residual=st.booleans(),
    exponent=st.sampled_from([0, 0, -30, 30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_quantised_weights_equal_float64(
    variant: str,
    quantization: str,
    dtype: torch.dtype,
    rows: int,
    groups: int,
    features: list[int],
    with_biases: list[bool],
    with_residual: bool,
    exponent: int,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    size = 2.0**exponent
    x = (torch.randn(rows, 32 * groups) * size).to(dtype)
    weights = [random_weight(count, 32 * groups, dtype) for count in features]
    biases = [
        (torch.randn(count) * size).to(dtype) if with_bias else None
        for count, with_bias in zip(features, with_biases, strict=False)
    ]
    residual = (torch.randn(rows, sum(features)) * size).to(dtype) if with_residual else None
    with use(variant):
        product = QuantisedWeight(weights, quantization, biases).multiply(x, residual)
    assert_is_product(product, x, [kept(weight, quantization) for weight in weights], biases, residual)


@each_variant
@each_quantization
@each_dtype
def test_products_with_many_rows_are_those_of_packed_weights(
    variant: str, quantization: str, dtype: torch.dtype
) -> None:
    """Bit by bit: they come from the same code."""
    torch.manual_seed(0)
    weights = [random_weight(70, 1056, dtype) for _ in range(2)]
    remaining = [kept(weight, quantization) for weight in weights]
    for rows in (100, 300):
        x = torch.randn(rows, 1056).to(dtype)
        with use(variant):
            for activation in (None, "silu"):
                given_ = QuantisedWeight(weights, quantization, activation=activation).multiply(x)
                assert torch.equal(given_, PackedWeight(remaining, activation=activation).multiply(x))


@each_variant
@each_quantization
@each_dtype
@pytest.mark.parametrize("rows", [1, 3, 7, 40])
def test_gated_products(variant: str, quantization: str, dtype: torch.dtype, rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 96).to(dtype)
    weights = [(torch.randn(75, 96) / 10).to(dtype) for _ in range(2)]
    residual = torch.randn(rows, 75).to(dtype)
    with use(variant):
        given_ = QuantisedWeight(weights, quantization, activation="silu").multiply(x, residual)
    gates, ups = (x.double() @ kept(weight, quantization).double().T for weight in weights)
    expected = functional.silu(gates) * ups + residual.double()
    assert_close(given_, expected, torch.full_like(expected, 10.0))


@each_variant
@each_quantization
@each_dtype
def test_one_input_at_a_time_finds_every_weight(variant: str, quantization: str, dtype: torch.dtype) -> None:
    """Each row reads one column, alone and among others: no integer and no scale is in another's place."""
    torch.manual_seed(0)
    weight = random_weight(33, 64, dtype)
    expected = kept(weight, quantization).T
    x = torch.eye(64).to(dtype)
    with use(variant):
        packed = QuantisedWeight([weight], quantization)
        assert torch.equal(packed.multiply(x), expected)
        for rows in (1, 2, 3, 4, 5):
            assert torch.equal(torch.cat([packed.multiply(part) for part in x.split(rows)]), expected)


@each_variant
@each_quantization
@each_dtype
def test_threads_do_not_change_a_bit(variant: str, quantization: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(200, 96).to(dtype) for _ in range(2)]
    for rows in (1, 3, 17, 300):
        x = torch.randn(rows, 96).to(dtype)
        results = []
        for num_threads in (1, 2):
            with use(variant, num_threads):
                results.append(QuantisedWeight(weights, quantization).multiply(x))
        assert torch.equal(*results)


@each_variant
@each_quantization
@each_dtype
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [1, 4, 40])
def test_what_is_no_number_stays_in_its_row(
    variant: str, quantization: str, dtype: torch.dtype, special: float, rows: int
) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 64).to(dtype)
    x = torch.randn(rows, 64).to(dtype)
    with use(variant):
        packed = QuantisedWeight([weight], quantization)
        expected = packed.multiply(x)
        x[rows - 1, 3] = special
        given_ = packed.multiply(x)
    assert torch.equal(given_[:-1], expected[:-1])
    assert not given_[-1].isfinite().any()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_eight_bits_are_wrong_by_half_a_step(size: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(50, 96) * size
    integers, scales, centres = quantise(weight, "int8")
    assert centres is None
    largest = weight.unflatten(-1, (-1, 32)).abs().amax(-1)
    assert (integers.abs() <= 127).all()
    # bfloat16 has 8 bits; rounded up, a scale is too large by less than the last of them.
    assert (scales.float() >= largest / 127 * (1 - 1e-6)).all()
    assert (scales.float() <= largest / 127 * (1 + 2**-7)).all()
    wrong = (dequantise(Quantised(integers, scales, None)) - weight).unflatten(-1, (-1, 32)).abs()
    assert (wrong <= 0.5001 * scales.float().unsqueeze(-1)).all()


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_four_bits_lose_less_than_from_the_smallest_weight_to_the_largest(size: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(500, 96) + torch.randn(500, 1)
    quantised = quantise(weight * size, "int4")
    assert quantised.integers.min() == -8
    assert quantised.integers.max() == 7
    groups = weight.unflatten(-1, (-1, 32))
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    step = (highest - lowest) / 15
    plain = ((groups - lowest) / step).round() * step + lowest
    wrong = dequantise(quantised) / size - weight
    assert wrong.norm() < 0.98 * (plain - groups).norm()


@each_quantization
def test_integers_times_powers_of_two_are_exact(quantization: str) -> None:
    torch.manual_seed(0)
    lowest, highest = (-127, 127) if quantization == "int8" else (-8, 7)
    integers = torch.randint(lowest, highest + 1, (50, 96))
    integers[:, ::32], integers[:, 5::32] = lowest, highest
    powers = 2.0 ** torch.randint(-8, 8, (50, 3, 1))
    exact = (integers.unflatten(-1, (-1, 32)) * powers).flatten(-2)
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(dequantise(quantise(exact, quantization), dtype).float(), exact)
        assert torch.equal(dequantise(quantise(-exact, quantization), dtype).float(), -exact)


@each_quantization
def test_zeros_stay_zeros(quantization: str) -> None:
    """Whole groups of them do."""
    torch.manual_seed(0)
    weight = torch.randn(3, 64)
    weight[1, 32:] = 0
    kept = dequantise(quantise(weight, quantization))
    assert (kept[1, 32:] == 0).all()
    assert (kept[1, :32] - weight[1, :32]).norm() < 0.1 * weight[1, :32].norm()


def test_in_bfloat16_weights_are_those_of_float32_rounded() -> None:
    torch.manual_seed(0)
    quantised = quantise(torch.randn(50, 96), "int8")
    exact, rounded = dequantise(quantised), dequantise(quantised, torch.bfloat16)
    assert rounded.dtype == torch.bfloat16
    assert ((rounded.float() - exact).abs() <= exact.abs() * 2**-8).all()
    is_tie = exact.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(rounded[~is_tie], exact.bfloat16()[~is_tie])


@needs_library
def test_sizes_in_memory() -> None:
    weight = torch.randn(64, 320)
    assert QuantisedWeight([weight], "int8").nbytes * 8 == 8.5 * weight.numel()
    assert QuantisedWeight([weight], "int4").nbytes * 8 == 5 * weight.numel()


@needs_library
def test_what_cannot_be_quantised_is_refused() -> None:
    assert is_quantisable(torch.zeros(3, 32))
    assert not is_quantisable(torch.zeros(3, 33))
    assert not is_quantisable(torch.zeros(3, 32, dtype=torch.float16))
    assert not is_quantisable(torch.zeros(3, 32, device="meta"))
    with pytest.raises(ValueError, match=r"quantization: expected one of \['int8', 'int4'\], got 'int3'"):
        QuantisedWeight([torch.zeros(3, 32)], "int3")
    with pytest.raises(ValueError, match=r"weights: expected a multiple of 32 inputs, got \[3, 33\]"):
        QuantisedWeight([torch.zeros(3, 33)], "int8")
    with pytest.raises(ValueError, match="weights: expected finite numbers"):
        quantise(torch.full((3, 32), torch.inf), "int4")
    with pytest.raises(ValueError, match="weights: expected finite numbers"):
        quantise(torch.full((3, 32), torch.nan), "int8")
    with pytest.raises(ValueError, match="biases: expected one for each of 1 weights, got 2"):
        QuantisedWeight([torch.zeros(3, 32)], "int8", [None, None])
    packed = QuantisedWeight([torch.zeros(3, 32)], "int8")
    with pytest.raises(ValueError, match=r"x: expected shape \[2, 32\], got \[2, 31\]"):
        packed.multiply(torch.zeros(2, 31))


@each_variant
@each_quantization
@each_dtype
def test_a_row_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(
    variant: str, quantization: str, dtype: torch.dtype
) -> None:
    """Few rows used to be added in another order than more: in bfloat16, answers depended on what else was in their batch."""
    torch.manual_seed(0)
    x = torch.randn(40, 1600).to(dtype)
    with use(variant):
        packed = QuantisedWeight([random_weight(3000, 1600, dtype)], quantization)
        expected = packed.multiply(x)
        for rows in (1, 3, 4, 13):
            assert torch.equal(packed.multiply(x[:rows].clone()), expected[:rows]), rows
