"""Which attention layers may leave rotation to a kernel, and that they then compute the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.model_zoo import TOKENS, VOCAB_SIZE, build, build_supported, logits
from support.tensors_on_cpu import OnCpu
from torch import nn

from radixkv.attention import BatchLimits, QueryBatch
from radixkv.cache import PrefixCache
from radixkv.config import ModelConfig
from radixkv.memory import KVPool
from radixkv.model.attention_function import attention_by
from radixkv.model.loader import load_model
from radixkv.model.model_input import HOST_TOKEN, ModelInput
from radixkv.model.replacement.deferred_rotation import (
    DeferredRotation,
    defer_rotation,
    restore_rotation,
    set_rotate_first,
)
from radixkv.model.replacement.merged_linear import merge_linears
from radixkv.model.replacement.probe import probe_attention
from radixkv.model.runner import ModelRunner


def generate(model: Any) -> torch.Tensor:
    mask = torch.ones_like(TOKENS)
    mask[:, :3] = 0  # padding
    return model.generate(TOKENS, attention_mask=mask, max_new_tokens=8, do_sample=False, pad_token_id=0)  # type: ignore[no-any-return]


def deferred(model: nn.Module) -> list[DeferredRotation]:
    return [module for module in model.modules() if isinstance(module, DeferredRotation)]


# Norms of heads; cosines for one half only; biases and a part of each head; neighbouring numbers as pairs; latent attention.
@pytest.mark.parametrize(
    ("name", "share"),
    [("llama", 1.0), ("qwen3", 1.0), ("gpt_oss", 0.0), ("stablelm", 1.0), ("cohere", 0.0), ("deepseek_v3", 0.0)],
)
def test_layers_that_rotate_as_llamas_do_are_found_and_give_the_same(name: str, share: float) -> None:
    model = build_supported(name)
    before, names = logits(model), dict(model.named_parameters()).keys()
    with probe_attention(model):
        probed = logits(model)
    count = defer_rotation(model)
    assert count == len(deferred(model)) == share * model.config.num_hidden_layers
    assert dict(model.named_parameters()).keys() <= names
    with probe_attention(model):
        torch.testing.assert_close(logits(model), probed, rtol=1e-4, atol=1e-4)
    restore_rotation(model)
    assert not deferred(model)
    assert dict(model.named_parameters()).keys() == names
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_does_not_hide_that_a_layer_rotates_as_llamas_do(dtype: torch.dtype) -> None:
    assert defer_rotation(build_supported("llama").to(dtype)) == 3
    assert defer_rotation(build_supported("cohere").to(dtype)) == 0


def test_a_model_that_no_engine_runs_computes_as_before() -> None:
    """With another attention function, as the error says that calls such a model, queries and keys were not rotated."""
    model = build_supported("llama")
    before, answer = logits(model), generate(model)
    defer_rotation(model)
    set_rotate_first(model, False)
    assert torch.equal(logits(model), before)
    assert torch.equal(generate(model), answer)


def test_a_layer_without_rotation_is_left_alone() -> None:
    model = build("smollm3", {"no_rope_layers": [1, 0, 1]})
    assert defer_rotation(model) == 2
    assert [module.layer_idx for module in deferred(model)] == [0, 2]


def test_a_layer_that_was_changed_is_left_alone() -> None:
    model = build_supported("llama")
    model.model.layers[0].self_attn.register_forward_hook(lambda *args: None)
    assert defer_rotation(model) == model.config.num_hidden_layers - 1


def test_the_attention_function_gets_what_it_needs_to_rotate() -> None:
    model = build_supported("llama")
    defer_rotation(model)
    (first, *_) = deferred(model)
    given: dict[str, Any] = {}

    def attend(module: nn.Module, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
        given.update(options)
        return torch.zeros(1, query.shape[2], query.shape[1], value.shape[3])

    with attention_by(model, attend):
        logits(model)
        assert "rotary" not in given
        set_rotate_first(model, False)
        logits(model)
    cosines, sines = given["rotary"]
    assert cosines.shape == sines.shape == (TOKENS.shape[1], first.head_dim)


@pytest.mark.parametrize("wanted", [True, False])
def test_a_model_on_a_gpu_defers_rotation_when_it_is_loaded(wanted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build_supported("llama")
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))
    before = logits(model)
    with OnCpu():
        load_model(model, ModelConfig(fuse_rotary=True))
        load_model(model, ModelConfig(fuse_rotary=wanted))
    assert bool(deferred(model)) is wanted
    merge_linears(model, lambda: logits(model))
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("merged", [True, False])
def test_a_model_on_a_gpu_can_be_given_to_another_runner(merged: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second used to fail, because the model was left with an attention that only the first could carry out."""
    model = build_supported("llama")
    before = logits(model)
    monkeypatch.setattr(type(model), "device", torch.device("cuda"))

    def load() -> ModelRunner:
        with OnCpu():
            loaded = load_model(model, ModelConfig(fuse_rotary=True, merge_linears=merged))
        return ModelRunner(replace(loaded, device=torch.device("cpu")))

    first, second = load(), load()
    for runner in (second, first):
        runner.use_pool(
            KVPool(runner.layer_shapes, 4, 4, torch.float32), "torch", BatchLimits(1, 8), enforce_eager=True
        )
    cache = PrefixCache(4, 4)
    table = cache.open([1, 2])
    cache.reserve(table, 2)
    two, one = np.array([2]), np.array([1])
    model_input = ModelInput(np.array([1, 2]), QueryBatch([table], np.array([0]), two), one, np.array([HOST_TOKEN]))
    assert second.run(model_input).shape == (1, VOCAB_SIZE)
    with pytest.raises(RuntimeError, match="it was given to another LLM since"):
        first.run(model_input)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(logits(model), before, rtol=1e-4, atol=1e-4)
