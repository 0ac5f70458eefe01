"""Products of rows that continue answers, and of a prompt's, where these differ: see ``factored.h`` and ``triples.h``."""

from __future__ import annotations

import pytest
import torch
from support.cpu_variants import assert_close, each_variant, use
from support.packed_products import product
from torch.nn import functional

from radixkv_cpu import (
    Blocks,
    BlockWeight,
    PackedWeight,
    QuantisedWeight,
    Weight,
    dequantise,
    library,
    quantise,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])


def of_blocks(weight: torch.Tensor, dtype: torch.dtype, numbers: torch.dtype) -> BlockWeight:
    """With integers from 0 to 15, and scales and centres of 16 or 32 bits."""
    integers, scales, centres = quantise(weight, "int4")
    assert centres is not None
    return BlockWeight([Blocks(4, integers + 8, scales.to(numbers), (centres - 8 * scales).to(numbers))], dtype)


@each_variant
@each_dtype
@pytest.mark.parametrize("kind", ["whole", "int4", "int8", "float16", "float32"])
def test_a_row_is_the_same_to_the_last_bit_whatever_rows_are_beside_it(
    variant: str, dtype: torch.dtype, kind: str
) -> None:
    """Alone, among other rows that continue answers, and among a prompt's rows, which do not change because of it."""
    torch.manual_seed(0)
    matrix = torch.randn(300, 544)
    x, residual = torch.randn(330, 544).to(dtype), torch.randn(330, 300).to(dtype)
    with use(variant, 2):
        if kind == "whole":
            weight: Weight = PackedWeight([matrix.to(dtype)])
        elif kind.startswith("int"):
            weight = QuantisedWeight([matrix.to(dtype)], kind)
        else:
            weight = of_blocks(matrix, dtype, getattr(torch, kind))
        of_prompts = product(weight, x, [], residual)
        answers = product(weight, x, [*range(330)], residual)
        for count in (1, 2, 4, 5, 9, 17):
            alone = product(weight, x[:count].clone(), [*range(count)], residual[:count].clone())
            assert torch.equal(alone, answers[:count]), count
        for count in (1, 15, 16, 17, 32, 33, 129, 300):
            assert torch.equal(product(weight, x[:count], [], residual[:count]), of_prompts[:count]), count
        for decoding in ([0], [329], [3, 7, 8, 20], [*range(40), 200], [5, *range(100, 130), 300, 329]):
            given = product(weight, x, decoding, residual)
            expected = of_prompts.clone()
            expected[decoding] = answers[decoding]
            assert torch.equal(given, expected), decoding


@each_variant
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_row_in_float32_is_the_same_on_any_number_of_threads(variant: str, activation: str | None) -> None:
    """With several chunks of a prompt's rows, and answers that go on among them, before them and behind them."""
    torch.manual_seed(0)
    x = torch.randn(610, 97)
    weights = [torch.randn(75, 97) for _ in range(2 if activation else 1)]
    for decoding in ([], [0, 609], [row for row in range(610) if row % 14], [*range(609)]):
        given = []
        for num_threads in (1, 2, 3):
            with use(variant, num_threads):
                given.append(product(PackedWeight(weights, (), activation), x, decoding))
        assert all(torch.equal(other, given[0]) for other in given[1:]), len(decoding)


@each_variant
@each_dtype
def test_one_input_at_a_time_finds_every_weight(variant: str, dtype: torch.dtype) -> None:
    """Exactly, rounded to nearest: no integer, scale or centre is in another's place."""
    torch.manual_seed(0)
    matrix = torch.randn(70, 128).to(dtype)
    quantised = quantise(matrix, "int4")
    exact, rounded = dequantise(quantised).T.to(dtype), dequantise(quantised, dtype).T
    x = torch.eye(128).to(dtype)
    with use(variant):
        weight = QuantisedWeight([matrix], "int4")
        for rows in (1, 3, 8, 11):
            given = torch.cat([product(weight, part.clone(), [*range(len(part))]) for part in x.split(rows)])
            assert ((given == exact) | (given == rounded)).all()


@each_variant
@pytest.mark.parametrize("rows", [1, 6, 20])
def test_gated_products_with_weights_that_are_not_rounded(variant: str, rows: int) -> None:
    torch.manual_seed(rows)
    x = torch.randn(rows, 96).bfloat16()
    weights = [(torch.randn(75, 96) / 10).bfloat16() for _ in range(2)]
    with use(variant):
        given = product(QuantisedWeight(weights, "int4", activation="silu"), x, [*range(rows)])
    # Where weights are rounded, they are wrong by 2^-9 of themselves at most.
    gates, ups = (x.double() @ dequantise(quantise(weight, "int4")).double().T for weight in weights)
    expected = functional.silu(gates) * ups
    size = torch.full_like(expected, 10.0 if variant in ("avx512_bf16", "avx2") else 3000.0)
    assert_close(given, expected, size)


@each_variant
@pytest.mark.parametrize("special", [float("nan"), float("inf")])
def test_what_is_no_number_stays_in_its_row(variant: str, special: float) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 64).bfloat16()
    with use(variant):
        weight = QuantisedWeight([torch.randn(40, 64).bfloat16()], "int4")
        expected = product(weight, x, [*range(6)])
        x[5, 3] = special
        given = product(weight, x, [*range(6)])
    assert torch.equal(given[:-1], expected[:-1])
    assert not given[-1].isfinite().any()


@each_variant
@pytest.mark.parametrize("rows", [1, 16, 33, 100])
@pytest.mark.parametrize("inputs", [1, 31, 32, 97, 544])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_a_prompts_rows_in_float32_are_as_exact_as_float32(
    variant: str, rows: int, inputs: int, activation: str | None
) -> None:
    """Numbers of many magnitudes, largest ones among them, with features and inputs that fill no tile."""
    torch.manual_seed(rows)
    x = torch.randn(rows, inputs) * 10.0 ** torch.randint(-9, 9, (inputs,))
    weights = [torch.randn(75, inputs) * 10.0 ** torch.randint(-9, 9, (75, 1)) for _ in range(2 if activation else 1)]
    with use(variant):
        given = product(PackedWeight(weights, (), activation), x, [])
    exact = [x.double() @ weight.double().T for weight in weights]
    size = [x.double().abs() @ weight.double().abs().T for weight in weights]
    if activation is None:
        # Every addition rounds, up to as many times as there are inputs.
        assert ((given - exact[0]).abs() <= size[0] * 2**-24 * (2 + 3 * inputs**0.5)).all()
    else:
        expected = functional.silu(exact[0]) * exact[1]
        scale = (exact[0].abs() + size[0]) * size[1] + 1e-30
        assert ((given - expected).abs() <= scale * 1e-6).all()


@each_variant
def test_large_floats_stay_finite(variant: str) -> None:
    x = torch.zeros(3, 64)
    x[1, 5], x[2, 6] = 2.0**127 * 1.99, -(2.0**127) * 1.99
    with use(variant):
        given = product(PackedWeight([torch.eye(64)]), x, [])
    assert torch.equal(given, x)


@each_variant
def test_no_number_of_a_prompt_stays_in_its_row(variant: str) -> None:
    x = torch.randn(40, 64)
    expected = x.clone()
    x[33, 7] = float("nan")
    with use(variant):
        given = product(PackedWeight([torch.eye(64)]), x, [])
    assert given[33].isnan().all()
    others = [row for row in range(40) if row != 33]
    assert torch.allclose(given[others], expected[others], rtol=1e-6)
