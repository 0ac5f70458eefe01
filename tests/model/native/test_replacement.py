"""Which modules native code stands in for, and which it must not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.model_zoo import SUPPORTED, WIDE, build, build_supported, logits
from torch import nn
from transformers.models.arcee.modeling_arcee import ArceeDecoderLayer
from transformers.models.llama.modeling_llama import LlamaMLP

from radixkv.config import ModelConfig
from radixkv.model import compute_target
from radixkv.model.loader import load_model
from radixkv.model.native import replace, weights_of
from radixkv.model.native.attention import NativeSelfAttention
from radixkv.model.native.experts import NativeExperts
from radixkv.model.native.layer import NativeDecoderLayer
from radixkv.model.native.linear import NativeLinear
from radixkv.model.native.mlp import NativeGatedMLP
from radixkv.model.native.norm import NativeRMSNorm, is_candidate
from radixkv_cpu import library, linear

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

CLASSES = (NativeDecoderLayer, NativeSelfAttention, NativeGatedMLP, NativeRMSNorm, NativeLinear)


def counts(model: nn.Module) -> tuple[int, ...]:
    """Native decoder layers, attention layers, MLPs, norms and other linears. No plain linear layer is left."""
    found = Counter(type(module) for module in model.modules())
    assert not found[nn.Linear]
    return tuple(found[kind] for kind in CLASSES)


# Of three, (decoder layers, attention, MLPs, norms, linears).
EXPECTED = {
    "llama": (3, 3, 3, 7, 1),
    "mistral": (3, 3, 3, 7, 1),
    "qwen2": (3, 3, 3, 7, 1),  # biases
    "qwen3": (3, 3, 3, 7, 1),  # heads normed: the norms are within the attention
    "gemma": (3, 3, 3, 7, 1),  # 1 + weight, GELU
    "gemma2": (3, 3, 3, 13, 1),  # what is added is normed
    "gemma3_text": (3, 3, 3, 13, 1),
    "seed_oss": (3, 3, 3, 7, 1),
    "stablelm": (0, 3, 3, 0, 1),  # layer norms; a part of each head turns
    "mixtral": (3, 3, 0, 7, 1),  # experts
    "apertus": (3, 3, 0, 7, 7),  # an activation of its own, no gate
    "olmo": (0, 3, 3, 0, 1),
    "olmo2": (0, 0, 3, 13, 13),  # norms over all heads at once
    "exaone4": (0, 2, 3, 9, 5),  # one layer does not turn
    # Neighbours turn, not halves.
    "cohere": (0, 0, 3, 0, 13),
    "ernie4_5": (0, 0, 3, 7, 13),
    "helium": (0, 0, 3, 7, 13),
    "glm": (0, 0, 0, 7, 19),
    "hunyuan_v1_dense": (0, 0, 3, 13, 13),  # normed after turning
    "phi": (0, 0, 0, 0, 19),
    "phi3": (0, 0, 0, 7, 13),
    "gpt_oss": (0, 0, 0, 7, 13),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_each_architecture_has_the_expected_replacements(name: str) -> None:
    assert counts(load_model(build_supported(name)).model) == EXPECTED[name]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tied_embedding_is_held_once(dtype: torch.dtype) -> None:
    tied = build("llama", {"tie_word_embeddings": True}).to(dtype)
    tokens = torch.tensor([[0, 5, tied.config.vocab_size - 1]])
    expected = tied.get_input_embeddings()(tokens)
    prepared = load_model(tied).model
    # Of both alone: in bfloat16, other layers stay as they are where neither native code nor oneDNN computes them.
    for part in (prepared.get_input_embeddings(), prepared.get_output_embeddings()):
        assert not sum(parameter.nbytes for parameter in part.parameters())
    assert (prepared.dtype, prepared.device.type) == (dtype, "cpu")
    torch.testing.assert_close(prepared.get_input_embeddings()(tokens), expected, rtol=0, atol=0)


def test_embeddings_that_stay_as_they_are() -> None:
    """Of a head of its own or with fewer bits, of another class, with a hook, or with a largest norm."""
    hooked, limited = (build("llama", {"tie_word_embeddings": True}) for _ in range(2))
    hooked.get_input_embeddings().register_forward_hook(lambda *_: None)
    limited.get_input_embeddings().max_norm = 1.0
    quantised = load_model(build("llama", {"tie_word_embeddings": True}), ModelConfig(quantization="int8")).model
    of_others = build("llama", {"tie_word_embeddings": False}), build("gemma", {"tie_word_embeddings": True})
    others = [hooked, limited, *of_others]
    for model in (quantised, *(load_model(other).model for other in others)):
        assert isinstance(model.get_input_embeddings(), nn.Embedding)
        assert len(model.get_input_embeddings().weight) == model.config.vocab_size


def test_norms_multiply_by_what_the_original_does() -> None:
    for name, shift in (("llama", 0.0), ("gemma", 1.0)):
        model = build_supported(name)
        nn.init.normal_(model.model.norm.weight)
        expected = model.model.norm.weight.detach() + shift
        torch.testing.assert_close(load_model(model).model.model.norm.scale, expected)


# Three layers' experts, of sizes that fill panels, or not.
@pytest.mark.parametrize(("name", "inner", "expected"), [
    ("mixtral", 96, 3), ("qwen3_moe", 64, 3), ("qwen2_moe", 64, 3), ("granitemoe", 96, 3),
    ("phimoe", 96, 3), ("deepseek_v3", 64, 2), ("mixtral", 80, 0),
    ("gpt_oss", 96, 0),  # biases, gates between what they gate, and a gate of its own
])  # fmt: skip
def test_experts_are_replaced_where_native_code_computes_them(name: str, inner: int, expected: int) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": inner, "moe_intermediate_size": inner}
    model = load_model(build(name, {**SUPPORTED[name], **sizes})).model
    assert Counter(type(module) for module in model.modules())[NativeExperts] == expected


def test_a_large_weight_is_told_from_one_more_in_bfloat16() -> None:
    """They differ by 2 %, about as much as roundings."""
    model = build("gemma2", SUPPORTED["gemma2"] | WIDE).to(torch.bfloat16)
    nn.init.uniform_(model.model.norm.weight, 30, 60)
    expected = model.model.norm.weight.detach().float() + 1
    torch.testing.assert_close(load_model(model).model.model.norm.scale, expected)


def test_in_bfloat16_a_factor_near_one_is_not_taken_for_rounding() -> None:
    """Layers with a factor of 0.975 used to be replaced by layers without one."""
    options = {**SUPPORTED["granite"], **WIDE}
    for factor, is_same in ((1.0, True), (0.975, False)):
        model = build("granite", {**options, "residual_multiplier": factor}).to(torch.bfloat16)
        assert (counts(load_model(model).model)[0] > 0) == is_same


def test_queries_that_are_scaled_at_far_positions() -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "llama_4_scaling_beta": 0.5,
    }
    model = load_model(build("ministral3", {"sliding_window": None, "rope_parameters": rope})).model
    assert counts(model) == (0, 0, 3, 7, 13)


def test_in_bfloat16_queries_that_are_scaled_at_far_positions() -> None:
    """By 7 %: in what attention gives that was lost in rounding."""
    sizes = {
        "hidden_size": 512,
        "head_dim": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "num_hidden_layers": 1,
    }
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1e6,
        "factor": 2.0,
        "original_max_position_embeddings": 256,
        "llama_4_scaling_beta": 0.1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    }
    for beta, is_same in ((0.0, True), (0.1, False)):
        given = {"initializer_range": 0.01, "rope_parameters": {**rope, "llama_4_scaling_beta": beta}}
        model = build("ministral3", {**sizes, "sliding_window": None, "max_position_embeddings": 512, **given})
        found = [type(module) for module in load_model(model.to(torch.bfloat16)).model.modules()]
        assert (NativeSelfAttention in found) == is_same


def test_projections_that_are_clipped() -> None:
    """At a number that common activations do not reach."""
    assert counts(load_model(build("olmo", {"clip_qkv": 30.0})).model) == (0, 0, 3, 0, 13)


def test_in_bfloat16_a_mean_is_not_overlooked() -> None:
    assert counts(load_model(build("cohere", WIDE).to(torch.bfloat16)).model) == (0, 0, 3, 0, 13)


def test_bfloat16_of_sizes_that_cannot_be_packed() -> None:
    """48 inputs, those of the down projections, are no multiple of 32: torch's own kernels compute these."""
    model = load_model(build_supported("llama").to(torch.bfloat16)).model
    found = Counter(type(module) for module in model.modules())
    assert [found[kind] for kind in CLASSES] == [3, 3, 0, 7, 7]


def test_half_precision_stays_as_it_is() -> None:
    model = load_model(build_supported("llama").half()).model
    assert not any(isinstance(module, CLASSES) for module in model.modules())


class Doubled(nn.Module):
    """Parts like a gated MLP's, composed in another way."""

    def __init__(self, original: Any, limit: float = torch.inf, factor: float = 1.0) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = original.gate_proj, original.up_proj, original.down_proj
        self.act_fn, self.limit, self.factor = original.act_fn, limit, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x).clamp(max=self.limit)
        return self.factor * self.down_proj(self.act_fn(gate) * self.up_proj(x))


@pytest.mark.parametrize(
    ("options", "is_same"), [({}, True), ({"limit": 20.0}, False), ({"factor": 1.05}, False), ({"factor": -1.0}, False)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mlps_that_compute_something_else(options: dict[str, float], is_same: bool, dtype: torch.dtype) -> None:
    model = build("llama", WIDE).to(dtype)
    for layer in model.model.layers:
        layer.mlp = Doubled(layer.mlp, **options)
    assert counts(load_model(model).model)[2] == 3 * is_same


@pytest.mark.parametrize("hidden_act", ["silu", "gelu", "gelu_pytorch_tanh", "relu", "gelu_new"])
def test_activations_that_native_code_has(hidden_act: str) -> None:
    assert counts(load_model(build("llama", {"hidden_act": hidden_act})).model) == (3, 3, 3, 7, 1)


@pytest.mark.parametrize("hidden_act", ["tanh", "relu2", "quick_gelu", "mish", "leaky_relu", "relu6", "gelu_10"])
def test_activations_that_it_does_not_have(hidden_act: str) -> None:
    assert counts(load_model(build("llama", {"hidden_act": hidden_act})).model) == (3, 3, 0, 7, 10)


def test_an_attention_with_parts_of_its_own() -> None:
    model = build_supported("llama")
    for layer in model.model.layers:
        layer.self_attn.gate = nn.Linear(32, 32)
    loaded = load_model(model).model
    assert not any(isinstance(module, NativeDecoderLayer | NativeSelfAttention) for module in loaded.modules())


@pytest.mark.parametrize("native", [True, False])
def test_a_linear_layer_whose_weight_is_read_by_its_parent_stays(native: bool) -> None:
    """Its replacement used to have no weight, and loading failed."""
    model = build_supported("llama")
    mlp = model.model.layers[1].mlp
    mlp.router = nn.Linear(32, 32, bias=False)
    forward = type(mlp).forward

    class Routed(type(mlp)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, nn.functional.linear(x, self.router.weight))

    mlp.__class__ = Routed
    tokens = torch.arange(3, 9).unsqueeze(0)
    with torch.inference_mode():
        expected = model(tokens).logits
        loaded = load_model(model, native=native).model
        torch.testing.assert_close(loaded(tokens).logits, expected, rtol=1e-4, atol=1e-4)
    assert type(mlp.router) is nn.Linear


@pytest.mark.parametrize("native", [True, False])
def test_linear_layers_that_are_called_with_a_keyword(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading used to fail."""

    def forward(mlp: Any, x: torch.Tensor) -> Any:
        return mlp.down_proj(input=mlp.gate_proj(input=x) + mlp.up_proj(input=x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = build_supported("llama")
    expected = logits(model)
    torch.testing.assert_close(logits(load_model(model, native=native).model), expected, rtol=1e-4, atol=1e-4)


def test_a_norm_that_has_a_bias_or_another_epsilon() -> None:
    model = build_supported("llama")
    biased: Any = model.model.norm
    biased.bias = nn.Parameter(torch.ones(32))
    other: Any = model.model.layers[0].input_layernorm
    forward = type(other).forward

    class Larger(type(other)):  # type: ignore[misc]
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x) * 1.001

    other.__class__ = Larger
    loaded = load_model(model).model
    assert loaded.model.norm is biased
    assert loaded.model.layers[0].input_layernorm is other
    # The first layer lacks a norm to be one call.
    assert counts(loaded)[0] == 2
    assert counts(loaded)[3] == 5


class Layer(nn.Module):
    """A decoder layer with the usual parts, composed in another way."""

    def __init__(self, original: nn.Module, norms_swapped: bool) -> None:
        super().__init__()
        for name, child in original.named_children():
            setattr(self, name, child)
        self.norms_swapped = norms_swapped

    def forward(self, x: torch.Tensor, **options: Any) -> torch.Tensor:
        norms = self.input_layernorm, self.post_attention_layernorm
        first, second = reversed(norms) if self.norms_swapped else norms
        factor = 1.0 if self.norms_swapped else 1.02
        x = x + factor * self.self_attn(hidden_states=first(x), **options)[0]
        hidden: torch.Tensor = x + self.mlp(second(x))
        return hidden


@pytest.mark.parametrize("norms_swapped", [False, True])
def test_decoder_layers_that_compute_something_else(norms_swapped: bool) -> None:
    """Residuals that are scaled; or norms that are applied in another order than they were made in."""
    model = build_supported("llama")
    for i, layer in enumerate(model.model.layers):
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
        model.model.layers[i] = Layer(layer, norms_swapped)
    assert counts(load_model(model).model)[:3] == (0, 3, 3)


@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_layers_around_an_mlp_of_another_kind_are_compared_with_its_weights(
    factor: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights that are still in files are zeros, and of zeros any multiple is the same."""

    def forward(layer: Any, hidden_states: torch.Tensor, **options: Any) -> torch.Tensor:
        attended, _ = layer.self_attn(hidden_states=layer.input_layernorm(hidden_states), **options)
        hidden_states = hidden_states + attended
        between: torch.Tensor = layer.mlp(layer.post_attention_layernorm(hidden_states))
        return hidden_states + factor * between

    monkeypatch.setattr(ArceeDecoderLayer, "forward", forward)
    build_supported("arcee").save_pretrained(tmp_path)
    assert counts(load_model(tmp_path, ModelConfig(dtype="float32")).model)[:3] == (3 * (factor == 1.0), 3, 0)


def test_hooks_are_kept() -> None:
    """A replacement would not call them."""
    model = build_supported("llama")
    calls: list[str] = []
    layer = model.model.layers[1]
    layer.mlp.register_forward_hook(lambda *_: calls.append("mlp"))
    layer.self_attn.q_proj.register_forward_pre_hook(lambda *_: calls.append("query"))
    layer.input_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
    forward = layer.post_attention_layernorm.forward
    layer.post_attention_layernorm.forward = lambda x: calls.append("patched") or forward(x)
    replace.prepare_for_cpu(model)
    calls.clear()
    with torch.inference_mode():
        model.set_attn_implementation("sdpa")
        model(torch.tensor([[1, 2, 3]]))
    assert calls == ["norm", "query", "patched", "mlp"]


def test_a_linear_layer_of_gpt2_with_a_hook_is_left_alone() -> None:
    model = build_supported("gpt2")
    hooked = model.transformer.h[1].mlp.c_fc
    hooked.register_forward_hook(lambda *_: None)
    load_model(model)
    assert [layer.mlp.c_fc is hooked for layer in model.transformer.h] == [False, True, False]


def test_a_model_that_is_prepared_again_stays_as_it_is() -> None:
    model = load_model(build_supported("qwen3")).model
    before = [id(module) for module in model.modules()]
    assert not is_candidate(model.model.norm)
    assert [id(module) for module in load_model(model).model.modules()] == before


def test_nothing_is_replaced_without_native_code_or_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_native(model: transformers.PreTrainedModel) -> bool:
        return not any(isinstance(module, CLASSES) for module in model.modules())

    assert no_native(load_model(build_supported("llama"), native=False).model)
    monkeypatch.setattr(compute_target, "library", lambda: None)
    assert no_native(load_model(build_supported("llama")).model)


def test_attention_functions_and_random_numbers_are_as_before() -> None:
    model = build_supported("llama")
    model.set_attn_implementation("eager")
    state = torch.get_rng_state()
    load_model(model)
    assert model.config._attn_implementation == "eager"
    assert torch.equal(torch.get_rng_state(), state)


def test_weights_of_a_folder_are_packed_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", WIDE).save_pretrained(tmp_path)
    packed: list[int] = []
    pack = linear.pack

    def watch(weights: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
        packed.append(len(weights))
        return pack(weights)

    monkeypatch.setattr(linear, "pack", watch)
    model = load_model(tmp_path, ModelConfig(dtype="float32")).model
    assert len(packed) == len(weights_of(model)) > 0
