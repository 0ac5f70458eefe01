"""Linear layers that read the same input are one product, of the same numbers in the same memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.model_zoo import build_supported, logits
from support.tensors_on_cpu import OnCpu
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from radixkv.config import ModelConfig
from radixkv.model.loader import load_model
from radixkv.model.replacement.merged_linear import MergedLinear, merge_linears


def merged_names(model: nn.Module) -> set[str]:
    return {name.rsplit(".", 1)[-1] for name, module in model.named_modules() if isinstance(module, MergedLinear)}


def nbytes(model: nn.Module) -> int:
    """Of all memory that the model keeps alive, once each."""
    tensors = [*model.parameters(), *(m._product._weight for m in model.modules() if isinstance(m, MergedLinear))]
    return sum({s.data_ptr(): s.nbytes() for s in (tensor.untyped_storage() for tensor in tensors)}.values())


# Biases; norms of heads between projection and attention; experts; latent attention, which calls others between the two.
@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("qwen2", {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}),
        ("qwen3_moe", {"q_proj", "k_proj", "v_proj"}),
        ("deepseek_v3", {"q_a_proj", "kv_a_proj_with_mqa", "gate_proj", "up_proj"}),
        ("phi3", set()),  # transformers has them merged
    ],
)
def test_merged_layers_give_the_same_from_the_same_memory(name: str, expected: set[str]) -> None:
    model = build_supported(name)
    before, size, names = logits(model), nbytes(model), dict(model.named_parameters()).keys()
    assert (merge_linears(model, lambda: logits(model)) > 0) is bool(expected)
    assert merged_names(model) == expected
    assert nbytes(model) == size
    assert dict(model.named_parameters()).keys() == names
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_layers_that_are_called_with_a_keyword_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(mlp: Any, x: torch.Tensor) -> Any:
        return mlp.down_proj(input=mlp.gate_proj(input=x) + mlp.up_proj(input=x))

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    model = build_supported("llama")
    before = logits(model)
    merge_linears(model, lambda: logits(model))
    assert {"gate_proj", "up_proj"} <= merged_names(model)
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


def test_layers_that_were_changed_are_left_alone() -> None:
    model = build_supported("llama")
    seen = []
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda *args: seen.append(1))
    merge_linears(model, lambda: logits(model))
    assert not isinstance(model.model.layers[0].self_attn.q_proj, MergedLinear)
    assert isinstance(model.model.layers[0].self_attn.k_proj, MergedLinear)
    assert isinstance(model.model.layers[1].self_attn.q_proj, MergedLinear)
    logits(model)
    assert len(seen) == 2


@pytest.mark.parametrize("wanted", [True, False])
def test_a_model_on_a_gpu_is_merged_when_it_is_loaded(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_supported("llama")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    with OnCpu():
        load_model(model, ModelConfig(merge_linears=wanted))
    assert bool(merged_names(model)) is wanted
    # On a CPU they are packed, which merges what pays there.
    monkeypatch.undo()
    other = build_supported("llama")
    load_model(other)
    assert not merged_names(other)


def test_weights_and_biases_that_are_changed_in_place_count() -> None:
    """The product used to keep the biases that it was made with."""
    model, other = build_supported("qwen2"), build_supported("qwen2", seed=1)
    assert merge_linears(model, lambda: logits(model)) > 0
    model.load_state_dict(other.state_dict())
    torch.testing.assert_close(logits(model), logits(other), rtol=1e-4, atol=1e-4)
