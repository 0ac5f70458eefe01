"""Decoder layers in one call give exactly what their parts give, called one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.cpu_variants import each_variant, use
from support.packed_products import product

from radixkv_cpu import (
    DecoderLayer,
    DecoderLayers,
    PackedWeight,
    PagedAttention,
    QuantisedWeight,
    RMSNorm,
    RowKind,
    Weight,
    library,
    rms_norm,
    rope_,
    write_cache,
)

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

QUERY_HEADS, KV_HEADS, DIM, WIDTH, INNER, BLOCK = 6, 2, 32, 96, 160, 4


@dataclass
class Norm:
    scale: torch.Tensor
    epsilon: float


@dataclass
class ShiftedNorm:
    """Stored less one, as Gemma's are."""

    weight: torch.Tensor
    epsilon: float

    @property
    def scale(self) -> torch.Tensor:
        return self.weight + 1


class Parts:
    """Random parts; and a batch of two sequences, of which the first already has keys in the cache."""

    def __init__(
        self,
        dtype: torch.dtype,
        with_head_norms: bool,
        with_output_norms: bool = False,
        quantization: str | None = None,
    ) -> None:
        torch.manual_seed(0)
        self.dtype = dtype

        def weight(outputs: int, inputs: int, count: int = 1, activation: str | None = None) -> Weight:
            matrices = [(torch.randn(outputs, inputs) / inputs**0.5).to(dtype) for _ in range(count)]
            if quantization is not None:
                return QuantisedWeight(matrices, quantization, (), activation)
            return PackedWeight(matrices, (), activation)

        self.input_norm: RMSNorm
        self.post_norm: RMSNorm
        self.input_norm, self.post_norm = (Norm(torch.rand(WIDTH) + 0.5, epsilon) for epsilon in (1e-5, 1e-2))
        heads = (Norm(torch.rand(DIM) + 0.5, 1e-4), Norm(torch.rand(DIM) + 0.5, 1e-3))
        self.head_norms = heads if with_head_norms else None
        outputs = (Norm(torch.rand(WIDTH) + 0.5, 1e-3), Norm(torch.rand(WIDTH) + 0.5, 1e-1))
        self.output_norms: tuple[RMSNorm, RMSNorm] | None = outputs if with_output_norms else None
        self.project = weight((QUERY_HEADS + 2 * KV_HEADS) * DIM, WIDTH)
        self.project_back = weight(WIDTH, QUERY_HEADS * DIM)
        self.gate_up, self.down = weight(INNER, WIDTH, 2, "silu"), weight(WIDTH, INNER)
        num_rows = 9
        self.x = torch.randn(num_rows, WIDTH).to(dtype)
        angles = torch.rand(num_rows, DIM // 2).repeat(1, 2) * 6
        self.cos, self.sin = angles.cos().to(dtype), angles.sin().to(dtype)
        self.keys, self.values = (torch.randn(6, BLOCK, KV_HEADS, DIM).to(dtype) for _ in range(2))
        tables = np.array([[0, 2, 4], [5, 1, 3]], dtype=np.int32)
        positions = np.array([6, 7, 8, *range(6)])
        sequences = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1])
        self.slots = torch.from_numpy(tables[sequences, positions // BLOCK] * BLOCK + positions % BLOCK).long()
        self.attention = PagedAttention(
            np.array([[0, 3], [3, 9]]), np.arange(2), np.array([[0, 0], [9, 6]]), tables, positions, BLOCK,
            np.full(2, RowKind.PROMPT, dtype=np.int8),
        )  # fmt: skip

    def layer(self, **options: Any) -> DecoderLayer:
        return DecoderLayer(
            self.input_norm, self.post_norm, self.head_norms,
            self.project, self.project_back, (self.gate_up, self.down), DIM,
            output_norms=self.output_norms, **{"scale": 0.2, **options},
        )  # fmt: skip

    def layer_with_an_mlp_of_another_kind(self, **options: Any) -> DecoderLayer:
        """An MLP of another kind that computes the same."""
        return DecoderLayer(
            self.input_norm, self.post_norm, self.head_norms, self.project, self.project_back,
            lambda x: self.down.multiply(self.gate_up.multiply(x)), DIM,
            output_norms=self.output_norms, **{"scale": 0.2, **options},
        )  # fmt: skip

    def one_by_one(
        self, keys: torch.Tensor, values: torch.Tensor, is_apart: bool = False, **options: Any
    ) -> torch.Tensor:
        normed = rms_norm(self.x, self.input_norm.scale, self.input_norm.epsilon)
        heads = product(self.project, normed, []).unflatten(-1, (-1, DIM))
        query, key, value = heads.split((QUERY_HEADS, KV_HEADS, KV_HEADS), dim=1)
        if self.head_norms is not None:
            for part, norm in zip((query, key), self.head_norms, strict=True):
                rms_norm(part, norm.scale, norm.epsilon, out=part)
        rope_(query, key, self.cos, self.sin)
        write_cache(key, value, keys, values, self.slots)
        attended = self.attention.attend(query, keys, values, **{"scale": 0.2, **options})
        x = self.add(self.x, self.project_back, attended.flatten(1), 0)
        inputs = rms_norm(x, self.post_norm.scale, self.post_norm.epsilon)
        if is_apart:  # without naming the rows that continue answers, and rounded before it is added
            output = self.down.multiply(self.gate_up.multiply(inputs))
            if self.output_norms is not None:
                output = rms_norm(output, self.output_norms[1].scale, self.output_norms[1].epsilon)
            return x + output
        return self.add(x, self.down, product(self.gate_up, inputs, []), 1)

    def add(self, x: torch.Tensor, weight: Weight, inputs: torch.Tensor, part: int) -> torch.Tensor:
        """``x`` and the product, which is normed first if there are norms."""
        if self.output_norms is None:
            return product(weight, inputs, [], x)
        norm = self.output_norms[part]
        return x + rms_norm(product(weight, inputs, []), norm.scale, norm.epsilon)

    def run(
        self, layer: DecoderLayer, keys: torch.Tensor | None = None, values: torch.Tensor | None = None, **changed: Any
    ) -> torch.Tensor:
        """One layer, over these caches or its own."""
        layers = DecoderLayers(
            [layer], [self.keys if keys is None else keys], [self.values if values is None else values]
        )
        return layers.run(**self.arguments(**changed))

    def arguments(self, **changed: Any) -> dict[str, Any]:
        names = "x", "cos", "sin", "slots", "attention"
        return {name: getattr(self, name) for name in names} | changed


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 3},
    "all": {"window": 5, "softcap": 2.0, "sinks": torch.linspace(-1, 2, QUERY_HEADS)},
}


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("with_head_norms", [False, True])
@pytest.mark.parametrize("with_output_norms", [False, True])
@pytest.mark.parametrize("is_apart", [False, True], ids=["gated MLP", "MLP of another kind"])
def test_one_call_gives_what_the_parts_give(
    variant: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    with_head_norms: bool,
    with_output_norms: bool,
    is_apart: bool,
) -> None:
    with use(variant):
        parts = Parts(dtype, with_head_norms, with_output_norms)
        keys, values = parts.keys.clone(), parts.values.clone()
        expected = parts.one_by_one(keys, values, is_apart, **options)
        layer = parts.layer_with_an_mlp_of_another_kind(**options) if is_apart else parts.layer(**options)
        given = parts.run(layer)
    assert torch.equal(given, expected)
    assert torch.equal(parts.keys, keys)
    assert torch.equal(parts.values, values)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [[0], [2, 8], [1, 2], [3, 5, 7], [*range(9)]], ids=str)
@pytest.mark.parametrize("is_apart", [False, True], ids=["gated MLP", "MLP of another kind"])
def test_kept_rows_are_what_they_are_beside_the_others(
    variant: str, dtype: torch.dtype, rows: list[int], is_apart: bool
) -> None:
    kept = torch.tensor(rows)
    with use(variant):
        parts = Parts(dtype, True, True)
        keys, values = parts.keys.clone(), parts.values.clone()
        layer = parts.layer_with_an_mlp_of_another_kind() if is_apart else parts.layer()
        expected = parts.run(layer, keys, values)
        attention = parts.attention.of_rows(kept.numpy())
        given = parts.run(layer, kept=(kept, attention))
    assert torch.equal(given, expected[kept])
    assert torch.equal(parts.keys, keys)
    assert torch.equal(parts.values, values)


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_weights(quantization: str) -> None:
    parts = Parts(torch.bfloat16, True, quantization=quantization)
    expected = parts.one_by_one(parts.keys.clone(), parts.values.clone())
    assert torch.equal(parts.run(parts.layer()), expected)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("quantization", [None, "int4"])
def test_rows_at_which_answers_go_on_change_no_other_row(
    variant: str, dtype: torch.dtype, quantization: str | None
) -> None:
    """They are the same with and without the others beside them; only what factored.h and triples.h are for differs."""
    kept, decoding = torch.tensor([1, 2, 8]), torch.tensor([2, 8])
    prompt = [row for row in range(9) if row not in decoding]
    with use(variant):
        parts = Parts(dtype, True, quantization=quantization)
        keys, values = parts.keys.clone(), parts.values.clone()
        plain = parts.run(parts.layer(), keys.clone(), values.clone())
        marked = parts.run(parts.layer(), keys, values, decoding=decoding)
        attention = parts.attention.of_rows(kept.numpy())
        some = parts.run(parts.layer(), kept=(kept, attention), decoding=decoding)
    assert torch.equal(marked[prompt], plain[prompt])
    assert torch.equal(some, marked[kept])
    assert torch.equal(parts.keys, keys)
    assert torch.equal(parts.values, values)
    is_factored = quantization == "int4" and (
        variant == "avx2" or (variant == "avx512_bf16" and dtype == torch.bfloat16)
    )
    is_split = variant == "amx" and dtype == torch.float32 and quantization is None
    assert torch.equal(marked, plain) != (is_factored or is_split)


@pytest.mark.parametrize("is_apart", [False, True], ids=["gated MLP", "MLP of another kind"])
def test_norms_whose_scales_are_computed_or_change_later(is_apart: bool) -> None:
    parts = Parts(torch.float32, False)
    shifted = [ShiftedNorm(torch.rand(WIDTH) - 0.5, 1e-5) for _ in range(4)]
    parts.input_norm, parts.post_norm = shifted[:2]
    parts.output_norms = shifted[2], shifted[3]
    expected = parts.one_by_one(parts.keys.clone(), parts.values.clone(), is_apart)
    layer = parts.layer_with_an_mlp_of_another_kind() if is_apart else parts.layer()
    for norm in shifted:
        norm.weight = torch.zeros(WIDTH)
    assert torch.equal(parts.run(layer), expected)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "x": ({"x": torch.zeros(8, WIDTH)}, r"x: expected shape \[9, 96\]"),
    "x not contiguous": ({"x": torch.zeros(WIDTH, 9).T}, "x: expected a contiguous tensor"),
    "type": ({"x": torch.zeros(9, WIDTH, dtype=torch.bfloat16)}, "x: expected float32, got bfloat16"),
    "cos": ({"cos": torch.zeros(9, 64), "sin": torch.zeros(9, 64)}, "cos: expected an even number of dimensions up to 32"),
    "sin": ({"sin": torch.zeros(9, 16)}, r"sin: expected shape \[9, 32\]"),
    "slots": ({"slots": torch.zeros(9, dtype=torch.int32)}, "slots: expected int64, got int32"),
    "type of decoding": ({"decoding": torch.arange(9).int()}, "decoding: expected int64, got int32"),
    "device": ({"x": torch.zeros(9, WIDTH, device="meta")}, "x: expected on cpu, got meta"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_refused_and_nothing_is_written(changed: dict[str, Any], message: str) -> None:
    parts = Parts(torch.float32, False)
    keys, values = parts.keys.clone(), parts.values.clone()
    with pytest.raises(ValueError, match=message):
        parts.run(parts.layer(), **changed)
    assert torch.equal(parts.keys, keys)
    assert torch.equal(parts.values, values)


def test_kept_rows_of_another_number_and_blocks_of_another_size_are_refused() -> None:
    parts = Parts(torch.float32, False)
    for kept, message in (
        (torch.arange(3), r"kept: expected shape \[9\], got \[3\]"),
        (torch.arange(9).int(), "int64"),
    ):
        with pytest.raises(ValueError, match=message):
            parts.run(parts.layer(), kept=(kept, parts.attention))
    more = PagedAttention(
        np.array([[0], [10]]), np.zeros(1, dtype=np.int64), np.array([[0], [4]]), np.zeros((1, 1), dtype=np.int32),
        np.zeros(10, dtype=np.int64), BLOCK, np.zeros(1, dtype=np.int8),
    )  # fmt: skip
    with pytest.raises(ValueError, match="kept: expected at most 9 rows, got 10"):
        parts.run(parts.layer(), kept=(torch.zeros(10, dtype=torch.int64), more))
    caches = [torch.zeros(6, 8, KV_HEADS, DIM) for _ in range(2)]
    with pytest.raises(ValueError, match="attention: expected blocks of 8 tokens, got 4"):
        parts.run(parts.layer(), *caches)


CACHES: dict[str, tuple[dict[str, Any], str]] = {
    "heads": ({"keys": torch.zeros(6, BLOCK, 1, DIM)}, r"keys\[0\]: expected shape \[6, 4, 2, 32\]"),
    "dimensions": ({"keys": torch.zeros(6, BLOCK, KV_HEADS, 16)}, r"keys\[0\]: expected shape \[6, 4, 2, 32\]"),
    "blocks": ({"values": torch.zeros(5, BLOCK, KV_HEADS, DIM)}, r"values\[0\]: expected shape \[6, 4, 2, 32\]"),
    "type": ({"values": torch.zeros(6, BLOCK, KV_HEADS, DIM).bfloat16()}, r"values\[0\]: expected float32"),
    "device": ({"values": torch.zeros(6, BLOCK, KV_HEADS, DIM, device="meta")}, r"values\[0\]: expected on cpu"),
}  # fmt: skip


@pytest.mark.parametrize(("changed", "message"), CACHES.values(), ids=CACHES)
def test_caches_that_are_not_the_layers_are_refused(changed: dict[str, Any], message: str) -> None:
    parts = Parts(torch.float32, False)
    with pytest.raises(ValueError, match=message):
        parts.run(parts.layer(), **changed)


@each_variant
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, [2, 8], [*range(9)]], ids=str)
def test_layers_in_one_call_give_what_each_gives_after_the_other(
    variant: str, dtype: torch.dtype, rows: list[int] | None
) -> None:
    """Layers with different heads and norms, each over a cache of its own."""
    decoding = torch.tensor([2, 8])
    with use(variant):
        parts = Parts(dtype, True, True)
        wide, narrow = Parts(dtype, False, quantization="int4"), Parts(dtype, False)
        layers = [parts.layer(), wide.layer(window=3), narrow.layer(softcap=2.0)]
        keys, values = ([torch.randn(6, BLOCK, KV_HEADS, DIM).to(dtype) for _ in layers] for _ in range(2))
        kept = None if rows is None else (torch.tensor(rows), parts.attention.of_rows(np.array(rows)))
        own_keys, own_values = ([each.clone() for each in caches] for caches in (keys, values))
        expected = parts.x
        for i, layer in enumerate(layers):
            is_last = i + 1 == len(layers)
            expected = parts.run(
                layer, own_keys[i], own_values[i], x=expected, kept=kept if is_last else None, decoding=decoding
            )
        given = DecoderLayers(layers, keys, values).run(**parts.arguments(kept=kept, decoding=decoding))
    assert torch.equal(given, expected)
    assert all(map(torch.equal, keys + values, own_keys + own_values))


def test_layers_that_do_not_follow_one_another_are_refused() -> None:
    parts, other = Parts(torch.float32, False), Parts(torch.bfloat16, False)
    apart = parts.layer_with_an_mlp_of_another_kind()
    with pytest.raises(ValueError, match="layers: expected at least one, and keys and values of each, got 0, 0, 0"):
        DecoderLayers([], [], [])
    with pytest.raises(
        ValueError, match=r"layers\[1\]: expected torch.float32 and width 96, got torch.bfloat16 and 96"
    ):
        DecoderLayers([parts.layer(), other.layer()], [parts.keys, other.keys], [parts.values, other.values])
    with pytest.raises(ValueError, match=r"layers\[1\]: expected one with a gated MLP among 2 layers"):
        DecoderLayers([parts.layer(), apart], [parts.keys] * 2, [parts.values] * 2)


def test_parts_that_do_not_belong_together_are_refused() -> None:
    parts = Parts(torch.float32, True)
    with pytest.raises(ValueError, match="sinks: expected shape"):
        parts.layer(sinks=torch.zeros(2))
    parts.down = PackedWeight([torch.zeros(WIDTH, 32)])
    with pytest.raises(ValueError, match="weights: expected a layer with heads of 32"):
        parts.layer()
    parts = Parts(torch.float32, False)
    parts.post_norm = Norm(torch.zeros(4), 1e-5)
    with pytest.raises(ValueError, match=r"post_norm: expected shape \[96\]"):
        parts.layer()


@pytest.mark.parametrize(
    ("name", "outputs", "inputs", "is_gated"),
    [
        ("project", (QUERY_HEADS + 2 * KV_HEADS) * DIM, WIDTH, True),
        ("project_back", WIDTH, QUERY_HEADS * DIM, True),
        ("gate_up", INNER, WIDTH, False),
        ("down", WIDTH, INNER, True),
    ],
)
def test_only_a_gated_mlp_has_a_gate(name: str, outputs: int, inputs: int, is_gated: bool) -> None:
    parts, weight = Parts(torch.float32, False), torch.zeros(outputs, inputs)
    setattr(parts, name, PackedWeight([weight] * 2, (), "silu") if is_gated else PackedWeight([weight]))
    with pytest.raises(ValueError, match=rf"weights: expected a layer .* whether gated\) .*{outputs}, {is_gated}\)"):
        parts.layer()


@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"window": 0}, "0 and None"),
        ({"window": -5}, "-5 and None"),
        ({"softcap": 0.0}, r"None and 0\.0"),
        ({"softcap": -3.0}, r"None and -3\.0"),
        ({"softcap": float("nan")}, "None and nan"),
        ({"softcap": float("inf")}, "None and inf"),
        ({"softcap": 1e39}, r"None and 1e\+39"),
        ({"softcap": 1e-50}, "None and 1e-50"),
    ],
    ids=str,
)
def test_windows_and_caps_are_those_that_attention_takes(options: dict[str, Any], given: str) -> None:
    """An infinite cap made every score NaN; one that float32 rounds to 0 or infinity was none, or did likewise."""
    expected = "window and softcap: expected at least 1 and a finite float32 above 0, or None"
    with pytest.raises(ValueError, match=f"{expected}, got {given}"):
        Parts(torch.float32, False).layer(**options)
