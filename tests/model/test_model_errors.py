"""What a model raises while it is tried out is reported with its name, and errors of other causes stay as they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.hub_cache import Checkpoint
from support.model_zoo import SUPPORTED, build, build_multimodal, build_supported
from support.prompt_sets import stem_and_tails, tokens_of, tokens_of_transformers
from torch.testing._internal.two_tensor import TwoTensor

from radixkv import LLM, SamplingParams
from radixkv.errors import UnsupportedModelError
from radixkv.model.native.linear import NativeLinear
from radixkv_cpu import library

_NEEDS_IMAGES = r"Kosmos2ForConditionalGeneration cannot compute a few tokens of text alone .*: ValueError: .*pixel"


def needs_images() -> Any:
    return build_multimodal("kosmos-2", {"embed_dim": 32, "layers": 2, "ffn_dim": 48, "attention_heads": 4})


def test_what_a_model_raises_for_text_alone_is_reported_with_its_name() -> None:
    """It was a ValueError of transformers' code, with or without the model's name."""
    with pytest.raises(UnsupportedModelError, match=f"^Kosmos2ForConditionalGeneration: {_NEEDS_IMAGES}"):
        LLM(needs_images())


def test_a_model_is_named_as_its_user_names_it(checkpoint_given: Checkpoint) -> None:
    """One of the hub was named by the folder of its revision in the hub's cache."""
    needs_images().save_pretrained(checkpoint_given.folder)
    with pytest.raises(UnsupportedModelError, match=f"^{checkpoint_given.model}: {_NEEDS_IMAGES}"):
        LLM(checkpoint_given.model)


def test_experts_of_sizes_that_torch_does_not_take_can_be_computed_by_the_models_own_code() -> None:
    """The error said what torch did: that strides should be multiples of 16 bytes."""
    sizes = SUPPORTED["mixtral"] | {"intermediate_size": 47}
    with pytest.raises(
        UnsupportedModelError, match=r"^MixtralForCausalLM: .*call model.set_experts_implementation\('eager'\)"
    ):
        LLM(build("mixtral", sizes))
    model = build("mixtral", sizes)
    model.set_experts_implementation("eager")
    expected = tokens_of_transformers(model, stem_and_tails(), 4)
    prompts = [{"prompt_token_ids": prompt} for prompt in stem_and_tails()]
    assert tokens_of(LLM(model, num_blocks=50), prompts, SamplingParams(temperature=0, max_tokens=4)) == expected


@pytest.mark.parametrize("layer", ["model.embed_tokens", "model.layers.1.input_layernorm", "model.norm", "lm_head"])
def test_a_model_that_computes_with_tensors_of_a_class_of_their_own_is_refused(layer: str) -> None:
    """Native code was given an address that such a tensor does not have, and the process ended."""
    model = build_supported("llama")
    module = model.get_submodule(layer)
    weight = module.get_parameter("weight").detach()
    module.weight = torch.nn.Parameter(TwoTensor(weight, weight), requires_grad=False)
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: expected weights .* got a TwoTensor$"):
        LLM(model, num_blocks=50)


def test_lack_of_memory_is_not_reported_as_a_fault_of_the_model() -> None:
    """It was said to be unable to compute text by its configuration: for a CPU's memory, torch raises a RuntimeError."""

    def take_too_much(*_: Any) -> None:
        torch.empty(2**60)

    model = build_supported("llama")
    model.model.register_forward_pre_hook(take_too_much)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        LLM(model)


@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_errors_of_replaced_modules_are_not_reported_as_faults_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was reported as if the model could not compute text by its configuration."""

    def fail(self: NativeLinear, input: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("of ours")

    monkeypatch.setattr(NativeLinear, "forward", fail)
    with pytest.raises(RuntimeError, match=r"^of ours$"):
        LLM(build_supported("llama"))
