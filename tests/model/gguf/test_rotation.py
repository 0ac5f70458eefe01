"""How a GGUF file scales rotary embeddings is part of the model that is made of it, or the file is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import refuse_blocks, write_model
from support.model_zoo import WIDE, WIDE_EXPERTS, build
from support.prompt_sets import tokens_of, tokens_of_transformers

from radixkv import LLM, SamplingParams
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loader import load_model

pytestmark = pytest.mark.usefixtures("model_cache")

SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 1}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
# The architectures whose files may be scaled: transformers' name, and what is particular about a tiny model.
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {}, {}),
    "qwen2": ("qwen2", {}, {}),
    "qwen3": ("qwen3", {}, {}),
    "qwen2moe": (
        "qwen2_moe",
        {**WIDE_EXPERTS, "shared_expert_intermediate_size": 32},
        {
            "expert_count": 4,
            "expert_used_count": 2,
            "expert_feed_forward_length": 64,
            "expert_shared_feed_forward_length": 32,
        },
    ),
    "qwen3moe": (
        "qwen3_moe",
        {**WIDE_EXPERTS, "norm_topk_prob": True},
        {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64},
    ),
    "gemma2": ("gemma2", {"query_pre_attn_scalar": 32, "sliding_window": 24}, {"attention.sliding_window": 24}),
    "gemma3": (
        "gemma3_text",
        {"query_pre_attn_scalar": 32, "sliding_window": 24, "num_hidden_layers": 7},
        {"attention.sliding_window": 24},
    ),
}
PROMPT = [5 + (7 * i + i * i) % 180 for i in range(150)]


@pytest.mark.parametrize("in_blocks", [True, False])
def test_frequencies_are_those_of_llama_3(in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama", SIZES | {"rope_parameters": LLAMA3})
    truth = model.model.rotary_emb.inv_freq
    plain = build("llama", SIZES | {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}})
    factors = (plain.model.rotary_emb.inv_freq / truth).numpy()
    write_model(model, tmp_path / "tiny.gguf", "llama", tensors={"rope_freqs.weight": factors})
    if not in_blocks:
        refuse_blocks(monkeypatch)
    model = load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"), native=False).model
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, truth)


def scaled(architecture: str, parameters: dict[str, Any], path: Path, fields: dict[str, Any]) -> Any:
    """A model with these rotary embeddings, written to a file of float32 weights; gemma3's sliding layers are not scaled."""
    name, options, own_fields = MODELS[architecture]
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": 10000.0}
        parameters = {"full_attention": parameters, "sliding_attention": local}
    model = build(name, {**WIDE, **options, "rope_parameters": parameters})
    write_model(model, path, architecture, lambda _: "F32", {**own_fields, **fields})
    return model


@pytest.mark.parametrize(
    ("architecture", "parameters", "fields"),
    [
        *[
            (architecture, LINEAR, {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0})
            for architecture in MODELS
        ],
        # As older files write it.
        ("qwen2", LINEAR, {"rope.scaling.factor": 4.0}),
        ("qwen2", LINEAR, {"rope.scale_linear": 4.0}),
        *[
            (
                architecture,
                YARN,
                {
                    "rope.scaling.type": "yarn",
                    "rope.scaling.factor": 4.0,
                    "rope.scaling.original_context_length": 64,
                    "rope.scaling.yarn_beta_fast": 32.0,
                    "rope.scaling.yarn_beta_slow": 1.0,
                },
            )
            for architecture in MODELS
            if not architecture.startswith("gemma")
        ],
        (
            "llama",
            {**YARN, "original_max_position_embeddings": 512, "attention_factor": 1.3 * (0.1 * math.log(4) + 1)},
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 1.3},
        ),
    ],
)
def test_scaled_models_compute_what_transformers_does(
    architecture: str, parameters: dict[str, Any], fields: dict[str, Any], tmp_path: Path
) -> None:
    truth = scaled(architecture, parameters, tmp_path / "tiny.gguf", fields)
    llm = LLM(tmp_path / "tiny.gguf", dtype="float32", num_blocks=64)
    params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    expected = tokens_of_transformers(truth, [PROMPT], 8)
    assert tokens_of(llm, [{"prompt_token_ids": PROMPT}], params) == expected
    ours = load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"), native=False).model
    ours.set_attn_implementation("eager")
    truth.set_attn_implementation("eager")
    with torch.inference_mode():
        logits = [model(torch.tensor([PROMPT]), use_cache=False).logits for model in (ours, truth)]
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        (
            "llama",
            {"rope.scaling.type": "longrope"},
            r"llama\.rope\.scaling\.type: expected 'none' or 'linear' or 'yarn'",
        ),
        ("gemma3", {"rope.scaling.type": "yarn"}, r"gemma3\.rope\.scaling\.type: expected 'none' or 'linear', which"),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_beta_fast": 4.0},
            r"yarn_beta_fast: .* or 32, .* got 4",
        ),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_attn_factor": 1.3},
            r"yarn_attn_factor: .*, got 1\.3",
        ),
        (
            "qwen2",
            {"rope.scaling.type": "yarn", "rope.scaling.yarn_log_multiplier": 0.1},
            r"yarn_log_multiplier: .*0\.1",
        ),
    ],
)
def test_other_scaling_is_refused_before_weights_are_read(
    in_blocks: bool,
    architecture: str,
    fields: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scaled(architecture, LINEAR, tmp_path / "tiny.gguf", {"rope.scaling.factor": 4.0, **fields})
    if not in_blocks:
        refuse_blocks(monkeypatch)
    monkeypatch.setattr("radixkv.model.weights.transformers_model.load_whole", None)
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf would not .*{message}.*possible instead is"):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))


def test_other_factors_are_refused(tmp_path: Path) -> None:
    factors = torch.full((32,), 2.0).numpy()
    write_model(build("llama", SIZES), tmp_path / "tiny.gguf", "llama", tensors={"rope_freqs.weight": factors})
    with pytest.raises(
        ModelLoadError, match=r"rope_freqs\.weight: expected factors as Llama 3\.1 has them, .*, up to 2"
    ):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))
