"""Products with packed weights against float64, for every compiled variant."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import assert_close, each_variant, use
from support.packed_products import assert_is_product
from torch.nn import functional

from radixkv_cpu import ACTIVATIONS, PackedWeight, linear

REFERENCE = {
    "silu": functional.silu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu": functional.gelu,
    "relu": functional.relu,
}
ROWS = st.one_of(st.integers(1, 70), st.sampled_from([255, 257, 513]))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16])


def num_inputs(data: st.DataObject, dtype: torch.dtype) -> int:
    """In bfloat16 a multiple of 32; anything in float32."""
    if dtype == torch.bfloat16:
        return 32 * data.draw(st.integers(1, 5), label="inputs / 32")
    return data.draw(st.one_of(st.integers(1, 70), st.sampled_from([127, 160])), label="inputs")


@each_variant
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    dtype=DTYPES,
    rows=ROWS,
    features=st.lists(st.integers(1, 100), min_size=1, max_size=3),
    with_biases=st.lists(st.booleans(), min_size=3, max_size=3),
    with_residual=st.booleans(),
    exponent=st.sampled_from([0, 0, -30, 30]),
    seed=st.integers(0, 2**32 - 1),
)
def test_products_of_packed_weights_equal_float64(
    variant: str,
    data: st.DataObject,
    dtype: torch.dtype,
    rows: int,
    features: list[int],
    with_biases: list[bool],
    with_residual: bool,
    exponent: int,
    seed: int,
) -> None:
    """With one to three weights at once, and of large and small numbers."""
    torch.manual_seed(seed)
    inputs = num_inputs(data, dtype)
    size = 2.0**exponent
    x = (torch.randn(rows, inputs) * size).to(dtype)
    weights = [torch.randn(count, inputs).to(dtype) for count in features]
    biases = [
        (torch.randn(count) * size).to(dtype) if with_bias else None
        for count, with_bias in zip(features, with_biases, strict=False)
    ]
    residual = (torch.randn(rows, sum(features)) * size).to(dtype) if with_residual else None
    with use(variant):
        given_ = PackedWeight(weights, biases).multiply(x, residual)
    assert_is_product(given_, x, weights, biases, residual)


@each_variant
@pytest.mark.parametrize("activation", ACTIVATIONS)
@settings(max_examples=20, deadline=None)
@given(
    data=st.data(),
    dtype=DTYPES,
    rows=ROWS,
    features=st.integers(1, 100),
    size=st.sampled_from([1e-3, 1.0, 30.0]),
    seed=st.integers(0, 2**32 - 1),
)
def test_gated_products(
    variant: str,
    activation: str,
    data: st.DataObject,
    dtype: torch.dtype,
    rows: int,
    features: int,
    size: float,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    inputs = num_inputs(data, dtype)
    x = (torch.randn(rows, inputs) * size).to(dtype)
    gate, up = (torch.randn(features, inputs).to(dtype) for _ in range(2))
    residual = torch.randn(rows, features).to(dtype)
    with use(variant):
        given_ = PackedWeight([gate, up], activation=activation).multiply(x, residual)
    gates, ups = x.double() @ gate.double().T, x.double() @ up.double().T
    # No activation is steeper than 1.13; near a gate of 0 what it is multiplied by counts in full.
    sums = [x.double().abs() @ weight.double().abs().T for weight in (gate, up)]
    magnitude = 2 * (sums[0] * (ups.abs() + 1e-5 * sums[1]) + sums[1] * gates.abs()) + residual.double().abs()
    assert_close(given_, REFERENCE[activation](gates) * ups + residual.double(), magnitude)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("rows", [1, 5, 40])
def test_what_is_no_number_stays_in_its_row(variant: str, dtype: torch.dtype, special: float, rows: int) -> None:
    x = torch.ones(rows, 64, dtype=dtype)
    x[rows - 1, 3] = special
    weight = torch.ones(40, 64, dtype=dtype)
    weight[1, 3] = -1
    with use(variant):
        given_ = PackedWeight([weight]).multiply(x)
    torch.testing.assert_close(given_, x @ weight.T, equal_nan=True)


def test_a_bfloat16_weight_may_begin_anywhere_in_its_memory() -> None:
    memory = torch.randn(1 + 64 * 32).to(torch.bfloat16)
    weight = memory[1:].view(64, 32)
    assert torch.equal(linear.pack([weight]), linear.pack([weight.clone()]))


@each_variant
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_at_the_ends_of_the_numbers(variant: str, activation: str) -> None:
    """As torch computes them; a NaN stays NaN, in `relu` too."""
    gates = torch.tensor([float("nan"), 0.0, -0.0, 1e30, -1e30, 87.0, -87.0, 1e-40, float("inf")])
    with use(variant):
        packed = PackedWeight([gates[:, None], torch.ones(9, 1)], activation=activation)
        given_ = packed.multiply(torch.ones(1, 1))[0]
    # Of infinity torch's own `gelu` is NaN in some of its versions.
    torch.testing.assert_close(given_[:8], REFERENCE[activation](gates[:8]), atol=1e-35, rtol=1e-5, equal_nan=True)
    assert given_[8] == float("inf")


@each_variant
def test_silu_of_the_lowest_gates_that_do_not_vanish(variant: str) -> None:
    """Without AVX-512 they did from -88 on, where e^88 is far from infinite."""
    gates = torch.tensor([-86.0, -88.01, -88.4, -88.72])
    with use(variant):
        packed = PackedWeight([gates[:, None], torch.ones(4, 1)], activation="silu")
        given_ = packed.multiply(torch.ones(1, 1))[0]
    torch.testing.assert_close(given_.double(), functional.silu(gates.double()), atol=0, rtol=1e-5)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_threads_do_not_change_a_bit(variant: str, dtype: torch.dtype, activation: str | None) -> None:
    torch.manual_seed(0)
    weights = [torch.randn(200, 96).to(dtype) for _ in range(2)]
    for rows in (1, 3, 17, 300):
        x = torch.randn(rows, 96).to(dtype)
        results = []
        for num_threads in (1, 2):
            with use(variant, num_threads):
                results.append(PackedWeight(weights, activation=activation).multiply(x))
        assert torch.equal(*results)


@each_variant
def test_shapes_without_rows_with_many_dimensions_and_with_strides(variant: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 7)
    with use(variant):
        packed = PackedWeight([weight])
        assert packed.multiply(torch.empty(0, 7)).shape == (0, 5)
        assert packed.multiply(torch.zeros(7)).shape == (5,)
        x = torch.randn(7, 3, 2).permute(1, 2, 0)
        residual = torch.randn(2, 3, 5).transpose(0, 1)
        torch.testing.assert_close(packed.multiply(x, residual), x @ weight.T + residual)


@each_variant
def test_several_threads_multiply_by_one_weight(variant: str) -> None:
    """Each gets the product of its own input; calls do not share arguments."""
    torch.manual_seed(0)
    xs = [torch.randn(rows, 256) for rows in (8, 40)]
    with use(variant):
        packed = PackedWeight([torch.randn(256, 256)])
        expected = [packed.multiply(x) for x in xs]
        with ThreadPoolExecutor(2) as pool:
            same = pool.map(lambda x, y: all(torch.equal(packed.multiply(x), y) for _ in range(300)), xs, expected)
        assert list(same) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_the_weights_as_they_were(dtype: torch.dtype) -> None:
    weights = [torch.randn(features, 64).to(dtype) for features in (40, 33)]
    packed = PackedWeight(weights, [torch.ones(40, dtype=dtype), None])
    features = torch.tensor([[0, 72, 31], [32, 40, 0]])
    torch.testing.assert_close(packed.rows(features), torch.cat(weights)[features], rtol=0, atol=0)
    assert packed.rows(features[:0]).shape == (0, 3, 64)
    for wrong in (-1, 73):
        with pytest.raises(IndexError, match="from 0 to 72"):
            packed.rows(torch.tensor([wrong]))
    with pytest.raises(ValueError, match="gated"):
        PackedWeight([weights[0], weights[0]], activation="silu").rows(features)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(variant: str, dtype: torch.dtype) -> None:
    """A single row, few and many rows used to be added in three orders: answers depended on what else was in their batch."""
    torch.manual_seed(0)
    x = torch.randn(300, 1600).to(dtype)
    weight = torch.randn(500, 1600).to(dtype)
    with use(variant):
        packed = PackedWeight([weight])
        expected = packed.multiply(x)
        for rows in (1, 2, 3, 5, 12, 13, 16, 17, 33, 64):
            assert torch.equal(packed.multiply(x[:rows].clone()), expected[:rows]), rows
