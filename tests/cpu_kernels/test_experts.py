"""Mixtures of experts against products with each expert's own weights, for every compiled variant."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.cpu_variants import assert_close, each_variant, guarded, is_untouched, use

from radixkv_cpu import Experts, PackedWeight, QuantisedWeight, Weight, library

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

# Weights of one or more experts, one below the other.
Make = Callable[[Sequence[torch.Tensor], str | None], Weight]

WIDTH, INNER, NUM_EXPERTS = 96, 64, 5
KINDS: dict[str, Make] = {
    "packed": lambda weights, activation: PackedWeight(weights, (), activation),
    "int8": lambda weights, activation: QuantisedWeight(weights, "int8", (), activation),
    "int4": lambda weights, activation: QuantisedWeight(weights, "int4", (), activation),
}


class Parts:
    """Random experts."""

    def __init__(self, dtype: torch.dtype, make: Make, activation: str) -> None:
        generator = torch.Generator().manual_seed(0)

        def matrices(features: int, inputs: int) -> torch.Tensor:
            return (torch.randn(NUM_EXPERTS, features, inputs, generator=generator) / inputs**0.5).to(dtype)

        gate, up, down = matrices(INNER, WIDTH), matrices(INNER, WIDTH), matrices(WIDTH, INNER)
        self.together = make([gate.flatten(0, 1), up.flatten(0, 1)], activation), make([down.flatten(0, 1)], None)
        self.apart = [
            (make([gate[i], up[i]], activation), make([down[i]], None)) for i in range(NUM_EXPERTS)
        ]  # fmt: skip

    def one_by_one(self, x: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        """What each row's experts give: ``[rows, experts of a row, width]``, zeros for a number of no expert."""
        given = torch.zeros(*chosen.shape, WIDTH, dtype=torch.float64)
        for expert, (gate_up, down) in enumerate(self.apart):
            rows, places = torch.where(chosen == expert)
            if len(rows):
                given[rows, places] = down.multiply(gate_up.multiply(x[rows])).double()
        return given


@each_variant
@settings(max_examples=40, deadline=None)
@given(
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    kind=st.sampled_from([*KINDS]),
    activation=st.sampled_from(["silu", "gelu_tanh", "gelu", "relu"]),
    rows=st.one_of(st.integers(1, 40), st.sampled_from([300, 700])),
    per_row=st.integers(1, 4),
    num_threads=st.sampled_from([1, 2]),
)
def test_experts_equal_their_mlps_in_float64(
    variant: str,
    data: st.DataObject,
    dtype: torch.dtype,
    kind: str,
    activation: str,
    rows: int,
    per_row: int,
    num_threads: int,
) -> None:
    """All rows may choose the same expert, an expert may get no row, and a number may name no expert."""
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), label="seed"))
    highest = data.draw(st.integers(1, NUM_EXPERTS + 1), label="highest expert + 1")
    with use(variant, num_threads):
        parts = Parts(dtype, KINDS[kind], activation)
        x, around = guarded(torch.randn(rows, WIDTH, generator=generator).to(dtype))
        chosen = torch.randint(-1, highest, (rows, per_row), generator=generator)
        weights = torch.rand(rows, per_row, generator=generator)
        given_rows = Experts(*parts.together, NUM_EXPERTS).run(x, chosen, weights)
        each = parts.one_by_one(x, chosen) * weights.double().unsqueeze(-1)
    assert_close(given_rows, each.sum(1), each.abs().sum(1))
    assert is_untouched(around)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_the_others(variant: str, dtype: torch.dtype) -> None:
    """To the last bit: so an answer does not depend on its batch, nor the tokens of drafts on how many there are."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(400, WIDTH, generator=generator).to(dtype)
    chosen = torch.rand(400, NUM_EXPERTS, generator=generator).topk(2).indices
    weights = torch.rand(400, 2, generator=generator)
    with use(variant, 2):
        experts = Experts(*Parts(dtype, KINDS["packed"], "silu").together, NUM_EXPERTS)
        together = experts.run(x, chosen, weights)
        for first, count in ((0, 1), (7, 3), (399, 1), (100, 20), (30, 300)):
            part = slice(first, first + count)
            assert torch.equal(experts.run(x[part], chosen[part], weights[part]), together[part])


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "width": ({"x": torch.zeros(3, WIDTH + 1)}, r"x: expected shape \[any, 96\], got \[3, 97\]"),
    "type": ({"x": torch.zeros(3, WIDTH).bfloat16()}, "x: expected float32, got bfloat16"),
    "rows": ({"chosen": torch.zeros(2, 2, dtype=torch.int64)}, r"chosen: expected shape \[3, any\], got \[2, 2\]"),
    "no rows": ({"chosen": torch.tensor(1)}, r"chosen: expected shape \[3, any\], got \[\]"),
    "numbers": ({"chosen": torch.zeros(3, 2, dtype=torch.int32)}, "chosen: expected int64, got int32"),
    "weights": ({"weights": torch.zeros(3, 1)}, r"weights: expected shape \[3, 2\], got \[3, 1\]"),
    "strides": ({"weights": torch.zeros(2, 3).T}, "weights: expected a contiguous tensor"),
}


@pytest.mark.parametrize(("bad", "message"), BAD.values(), ids=BAD)
def test_bad_rows(bad: dict[str, torch.Tensor], message: str) -> None:
    good = {"x": torch.zeros(3, WIDTH), "chosen": torch.zeros(3, 2, dtype=torch.int64), "weights": torch.zeros(3, 2)}
    experts = Experts(*Parts(torch.float32, KINDS["packed"], "silu").together, NUM_EXPERTS)
    with pytest.raises(ValueError, match=message):
        experts.run(**{**good, **bad})


@pytest.mark.parametrize(("inner", "num_experts"), [(INNER, NUM_EXPERTS + 1), (INNER + 16, 2)])
def test_parts_that_do_not_belong_together(inner: int, num_experts: int) -> None:
    gate, down = torch.zeros(2 * inner, WIDTH), torch.zeros(2 * WIDTH, inner)
    with pytest.raises(ValueError, match=rf"weights: expected those of {num_experts} experts, .*, got \(type, inputs"):
        Experts(PackedWeight([gate, gate], (), "silu"), PackedWeight([down]), num_experts)


@pytest.mark.parametrize("gated", [(False, False), (True, True)], ids=["neither", "both"])
def test_experts_whose_gates_are_missing_or_too_many(gated: tuple[bool, bool]) -> None:
    shapes = ((NUM_EXPERTS * INNER, WIDTH), (NUM_EXPERTS * WIDTH, INNER))
    parts = [
        PackedWeight([torch.zeros(shape)] * 2, (), "silu") if is_gated else PackedWeight([torch.zeros(shape)])
        for shape, is_gated in zip(shapes, gated, strict=True)
    ]
    with pytest.raises(
        ValueError, match=r"weights: expected those of .*, got \(type, inputs, outputs, whether gated\)"
    ):
        Experts(*parts, NUM_EXPERTS)
