"""Models with quantised weights: what is quantised, that sharing changes no answer, and what is refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from support.model_zoo import SUPPORTED, WIDE, build, build_supported
from support.prompt_sets import shared_prefix_prompts, stem_and_tails, tokens_of
from torch import nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from radixkv import LLM, SamplingParams
from radixkv.config import ModelConfig, Quantization
from radixkv.model import compute_target, loader
from radixkv.model.loader import load_model
from radixkv.model.native import replace, weights_of
from radixkv.model.native.layer import NativeDecoderLayer
from radixkv_cpu import QUANTIZATIONS, dequantise, library, quantise

pytestmark = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")

each_quantization = pytest.mark.parametrize("quantization", QUANTIZATIONS)
# Attention, MLP and head quantised; biases; heads normed; layers of plain linears; experts; windows and soft-capped scores.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "cohere", "mixtral", "gemma2")


def tiny(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return build(name, SUPPORTED[name] | WIDE).to(dtype)


def kinds(model: nn.Module) -> list[str]:
    """Of every weight in the order of the layers: its quantization, or "plain"."""
    return [weight.kind or "plain" for weight in weights_of(model)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_linear_layer_is_quantised_and_the_head_has_8_bits(
    dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "radixkv"):
        model = load_model(tiny("llama", dtype), ModelConfig(quantization="int4")).model
    weights: Any = weights_of(model)
    assert sum(weight.num_weights for weight in weights) == 22
    size = sum(weight.nbytes for weight in weights) / 1e6
    assert f"int4 in 22 linear layers, whose weights take {size:.1f} MB" in caplog.text
    assert kinds(model) == ["int4"] * (len(weights) - 1) + ["int8"]
    assert weights[-1].out_features == 200
    assert {*kinds(load_model(tiny("llama", dtype), ModelConfig(quantization="int8")).model)} == {"int8"}
    assert {*kinds(load_model(tiny("llama", dtype)).model)} == {"plain"}


@each_quantization
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "cohere", "mixtral"])
def test_logits_are_those_of_a_model_with_the_weights_that_are_left(name: str, quantization: str) -> None:
    """transformers' own, whose weights were quantised and made floats again."""
    model, truth = (build(name, SUPPORTED[name] | WIDE | {"sliding_window": None}) for _ in range(2))
    head = truth.get_output_embeddings()
    untied = nn.Linear(head.in_features, head.out_features, bias=head.bias is not None)
    untied.load_state_dict(head.state_dict())
    truth.set_output_embeddings(untied)
    for module in truth.modules():
        if isinstance(module, nn.Linear):
            bits = "int8" if module is untied else quantization
            module.weight.data.copy_(dequantise(quantise(module.weight, bits)))
        elif isinstance(module, MixtralExperts):
            for weights in module.parameters():
                weights.data.copy_(dequantise(quantise(weights.flatten(0, 1), quantization)).view(weights.shape))
    model = load_model(model, ModelConfig(quantization=quantization)).model
    assert {quantization, "int8"} == {*kinds(model)}
    results = []
    for each in (model, truth):
        each.set_attn_implementation("sdpa")
        with torch.inference_mode():
            results.append(each(torch.arange(3, 40)[None], use_cache=False).logits)
    assert (results[0] - results[1]).norm() <= 1e-5 * results[1].norm()


@each_quantization
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_cached_and_uncached_runs_give_the_same_tokens(name: str, quantization: str) -> None:
    options: dict[str, Any] = {"num_blocks": 400, "quantization": quantization}
    prompts = shared_prefix_prompts(1, 12)
    unshared = LLM(tiny(name), block_size=4, enable_prefix_caching=False, max_num_seqs=1, **options)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = tokens_of(unshared, prompts, params)
    for block_size, chunk in ((1, 16), (3, 7), (16, 64)):
        llm = LLM(tiny(name), block_size=block_size, max_num_batched_tokens=chunk, **options)
        for _ in range(2):
            assert tokens_of(llm, prompts, params) == expected
        assert llm.engine.cache.stats.reused_tokens > 12 * 30


@each_quantization
def test_in_bfloat16_what_is_read_from_the_cache_differs_no_more_than_without_quantisation(quantization: str) -> None:
    """Log-probabilities of prompts computed alone and whole, and in chunks after a shared prefix."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    apart = []
    for kind in (None, quantization):
        found = []
        for options in ({"max_num_seqs": 1, "enable_prefix_caching": False}, {"max_num_batched_tokens": 7}):
            llm = LLM(tiny("llama", torch.bfloat16), block_size=4, num_blocks=200, quantization=kind, **options)
            outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in stem_and_tails()], params, False)
            found.append(
                torch.tensor(
                    [
                        step[token].logprob
                        for output in outputs
                        for step, token in zip(output.prompt_logprobs, output.prompt_token_ids, strict=True)
                        if step
                    ]
                )
            )
        apart.append((found[0] - found[1]).abs().mean())
    assert apart[1] <= 1.5 * apart[0]


def test_layers_whose_inputs_are_no_multiple_of_32_stay_as_they_are() -> None:
    """48 inputs, as those of the down projections here."""
    model = load_model(build_supported("llama"), ModelConfig(quantization="int8")).model
    assert kinds(model) == ["int8", "int8", "int8", "plain"] * 3 + ["int8"]


def test_a_pattern_that_does_not_fit_leaves_layers_that_are_quantised_alone() -> None:
    model = load_model(build("llama", WIDE | {"hidden_act": "tanh"}), ModelConfig(quantization="int4")).model
    assert kinds(model) == ["int4"] * (3 * (2 + 3)) + ["int8"]


def test_what_is_compared_is_not_quantised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a matching pattern could be refused for the error of 4 bits, and a wrong one be hidden by it."""
    seen = []
    error = replace.error_in_tolerances

    def watch(replacement: nn.Module, *others: Any) -> float:
        if not isinstance(replacement, NativeDecoderLayer):  # made of parts that were compared before
            seen.extend(kinds(replacement))
        return error(replacement, *others)

    monkeypatch.setattr(replace, "error_in_tolerances", watch)
    load_model(tiny("llama"), ModelConfig(quantization="int4"))
    assert {*seen} == {"plain"}


def test_a_model_that_is_loaded_again_stays_quantised() -> None:
    model = load_model(tiny("llama"), ModelConfig(quantization="int8")).model
    before = [id(module) for module in model.modules()]
    again = load_model(model, ModelConfig(quantization="int8")).model
    assert [id(module) for module in again.modules()] == before


@pytest.mark.parametrize(
    ("first", "then", "expected"),
    [(None, "int8", "None"), ("int8", "int4", "'int8' or None"), ("int4", "int8", "'int4' or N")],
)
def test_a_model_that_is_loaded_again_is_not_quantised_in_another_way(
    first: Quantization | None, then: Quantization, expected: str
) -> None:
    """It stayed as it was without a word, or was said to have no linear layers."""
    model = load_model(tiny("llama"), ModelConfig(quantization=first)).model
    with pytest.raises(
        ValueError, match=f"^quantization: expected {expected}.* LLM before, got '{then}': load it anew$"
    ):
        load_model(model, ModelConfig(quantization=then))


@pytest.mark.parametrize("quantization", ["int3", "INT8", 8])
def test_unknown_quantizations_are_refused(quantization: Any) -> None:
    with pytest.raises(
        ValueError, match=f"quantization: expected one of int8, int4, gguf or None, got {quantization!r}"
    ):
        LLM(tiny("llama"), quantization=quantization)


def test_quantization_is_refused_where_nothing_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"quantization: 'int8' is computed .* leave enable_torch_compile off"):
        LLM(tiny("llama"), quantization="int8", enable_torch_compile=True)
    with pytest.raises(ValueError, match=r"quantization: 'int8' is computed .* not float16: use another dtype"):
        LLM(tiny("llama", torch.float16), quantization="int8")
    with pytest.raises(ValueError, match=r"quantization: expected None for .*, got 'int4': .* multiple of 32 inputs"):
        LLM(build("llama", {"hidden_size": 36, "head_dim": 12}), quantization="int4")
    monkeypatch.setattr(compute_target, "library", lambda: None)
    with pytest.raises(ValueError, match=r"quantization: 'int4' is computed .* none of its variants runs here"):
        LLM(tiny("llama"), quantization="int4")


def test_a_gpu_is_refused_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(loader, "resolve_folder", lambda *_: pytest.fail("it was looked for"))
    with pytest.raises(ValueError, match=r"quantization: 'int8' is computed .* not on cuda: use a CPU"):
        load_model(None, ModelConfig(quantization="int8", device="cuda"))


@each_quantization
@pytest.mark.parametrize(
    ("module", "named"), [("model.layers.1.mlp.down_proj", "model.layers.1.mlp.down_proj"), ("lm_head", "output head")]
)
def test_weights_that_are_not_finite_are_refused_by_their_names(module: str, named: str, quantization: str) -> None:
    """The error used to name neither the model nor the layer."""
    model = tiny("llama")
    model.config.name_or_path = "some/model"
    with torch.no_grad():
        model.get_submodule(module).weight[0, 0] = torch.inf
    with pytest.raises(ValueError, match=rf"^some/model: {named}: weights: expected finite numbers"):
        load_model(model, ModelConfig(quantization=quantization))
