"""What a GGUF file says of its model is what is computed, also where transformers' converter does not read it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from support.gguf_files import refuse_blocks, write_model
from support.model_zoo import RECURRENT, WIDE, build

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.gguf.fields import Fields, apply_fields
from radixkv.model.loader import load_model

pytestmark = pytest.mark.usefixtures("model_cache")

_ROPE = {"rope_type": "default", "rope_theta": 500.0}
_GEMMA: dict[str, Any] = {"sliding_window": 12, "num_hidden_layers": 7}
# llama.cpp's name, transformers' name, what in the model differs from that architecture's default, and how the file says it.
SAID: dict[str, tuple[str, str, dict[str, Any], dict[str, Any]]] = {
    "head size": ("qwen3", "qwen3", {}, {}),
    "window": ("phi3", "phi3", {"sliding_window": 12}, {"attention.sliding_window": 12}),
    "part of a head": ("phi3", "phi3", {"partial_rotary_factor": 0.5}, {"rope.dimension_count": 16}),
    "base": ("starcoder2", "starcoder2", {"rope_parameters": _ROPE}, {}),
    "epsilon": ("starcoder2", "starcoder2", {"norm_epsilon": 0.1}, {"attention.layer_norm_epsilon": 0.1}),
    "base and part": (
        "stablelm",
        "stablelm",
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.5}},
        {"rope.dimension_count": 16, "attention.layer_norm_epsilon": 1e-5},
    ),
    "part and epsilon": (
        "nemotron",
        "nemotron",
        {"rope_parameters": {**_ROPE, "partial_rotary_factor": 0.25}, "norm_eps": 0.1},
        {"rope.dimension_count": 8, "attention.layer_norm_epsilon": 0.1},
    ),
    "softcaps": (
        "gemma2",
        "gemma2",
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0, "query_pre_attn_scalar": 32},
        {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 7.0},
    ),
    "scale of queries": (
        "gemma3",
        "gemma3_text",
        {**_GEMMA, "query_pre_attn_scalar": 32},
        {"attention.sliding_window": 12},
    ),
    "local base": (
        "gemma3",
        "gemma3_text",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 32,
            "rope_parameters": {"full_attention": {**_ROPE, "rope_theta": 1e5}, "sliding_attention": _ROPE},
        },
        {"attention.sliding_window": 12, "rope.freq_base_swa": 500.0},
    ),
    "which layers slide": (
        "gemma3",
        "gemma3_text",
        {
            **_GEMMA,
            "query_pre_attn_scalar": 32,
            "layer_types": ["sliding_attention", "full_attention"] * 3 + ["full_attention"],
        },
        {"attention.sliding_window": 12, "attention.sliding_window_pattern": [True, False] * 3 + [False]},
    ),
    "no layer slides": (
        "gemma3",
        "gemma3_text",
        {**_GEMMA, "query_pre_attn_scalar": 32, "layer_types": ["full_attention"] * 7},
        {},
    ),
}


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize("case", SAID)
def test_a_file_is_read_as_it_was_written(
    case: str, in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    architecture, name, options, fields = SAID[case]
    truth = build(name, {**WIDE, **options})
    fields = {**fields, "tokenizer.ggml.padding_token_id": 0}
    write_model(truth, tmp_path / "tiny.gguf", architecture, lambda _: "F32", fields)
    if not in_blocks:
        refuse_blocks(monkeypatch)
    ours = load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"), native=False).model
    tokens = torch.arange(3, 60)[None]
    logits = []
    for model in (ours, truth):
        model.set_attn_implementation("eager")
        with torch.inference_mode():
            logits.append(model(tokens, use_cache=False).logits)
    torch.testing.assert_close(*logits, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(("architecture", "layers"), [("gemma2", 46), ("gemma3", 62)])
def test_queries_of_gemma_27b_are_scaled_by_the_hidden_size_a_head(
    architecture: str, layers: int, tmp_path: Path
) -> None:
    """No field says so."""
    path = tmp_path / "tiny.gguf"
    name = "gemma2" if architecture == "gemma2" else "gemma3_text"
    fields = {"block_count": layers, "attention.key_length": 16, "attention.sliding_window": 12}
    write_model(build(name, {**WIDE, "num_hidden_layers": 1}), path, architecture, fields=fields)
    config = transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name)
    apply_fields(Fields(gguf.GGUFReader(path)), config)
    assert config.query_pre_attn_scalar == 64 // 2


@pytest.mark.parametrize("in_blocks", [True, False])
@pytest.mark.parametrize(
    ("fields", "tensors", "message"),
    [
        (
            {"attention.sliding_window": 12},
            {},
            r"llama\.attention\.sliding_window: expected its absence, or 0, .*got 12",
        ),
        ({"rope.scaling.attn_factor": 1.5}, {}, r"llama\.rope\.scaling\.attn_factor: .*got 1\.5"),
        ({"attention.causal": False}, {}, r"llama\.attention\.causal: .*got False"),
        ({"attention.scale": 0.5}, {}, r"llama\.attention\.scale: expected 0\.17.*got 0\.5"),
        ({"final_logit_softcapping": 30.0}, {}, r"llama\.final_logit_softcapping: .*got 30"),
        ({"residual_scale": 0.2}, {}, r"llama\.residual_scale: .*got 0\.2"),
        ({"rope.dimension_count": 16}, {}, r"llama\.rope\.dimension_count: expected 32, .*got 16"),
        (
            {},
            {"blk.0.attn_q.bias": np.ones(64)},
            r"blk\.0\.attn_q\.bias: expected no such tensor of a LlamaForCausalLM",
        ),
        ({}, {"blk.0.attn_q_norm.weight": np.ones(32)}, r"blk\.0\.attn_q_norm\.weight: expected no such tensor"),
        ({}, {"blk.0.attn_q.scale": np.full(1, 2.0)}, r"blk\.0\.attn_q\.scale: expected no such tensor"),
    ],
)
def test_what_the_model_does_not_know_is_refused_before_weights_are_read(
    in_blocks: bool,
    fields: dict[str, Any],
    tensors: dict[str, Any],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model_cache: Path,
) -> None:
    floats = {name: values.astype(np.float32) for name, values in tensors.items()}
    write_model(build("llama", WIDE), tmp_path / "tiny.gguf", "llama", fields=fields, tensors=floats)
    if not in_blocks:
        refuse_blocks(monkeypatch)
    monkeypatch.setattr("radixkv.model.weights.transformers_model.load_whole", None)
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf would not .*{message}.*possible instead is"):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))
    assert not list(model_cache.iterdir())


def test_what_changes_nothing_is_not_refused(tmp_path: Path) -> None:
    tensors = {
        "blk.0.attn_q.bias": np.zeros(64),
        "blk.0.attn_q.scale": np.ones(1),
        "v.blk.0.attn_q.weight": np.ones((4, 4)),
        "blk.0.attn_rot_embd.weight": np.ones(16),
    }
    fields = {
        "attention.causal": True,
        "residual_scale": 1.0,
        "attention.sliding_window": 0,
        "attention.scale": 32**-0.5,
    }
    floats = {name: values.astype(np.float32) for name, values in tensors.items()}
    write_model(build("llama", WIDE), tmp_path / "tiny.gguf", "llama", fields=fields, tensors=floats)
    load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))


@pytest.mark.parametrize("in_blocks", [True, False])
def test_answers_end_at_the_end_of_a_turn_as_well_as_of_a_text(
    in_blocks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields = {"tokenizer.ggml.eot_token_id": 7, "tokenizer.ggml.eom_token_id": 9}
    path = tmp_path / "tiny.gguf"
    write_model(build("llama", WIDE), path, "llama", fields=fields, control_tokens={11: "<end_of_turn>", 12: "<think>"})
    if not in_blocks:
        refuse_blocks(monkeypatch)
    assert load_model(path, ModelConfig(dtype="float32")).eos_token_ids == {2, 7, 9, 11}


def test_a_model_with_recurrent_layers_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    model = build("lfm2", {**RECURRENT["lfm2"], **WIDE})
    weights = model.state_dict()
    squeezed = {name: weight.squeeze(1) if weight.ndim == 3 else weight for name, weight in weights.items()}
    model.state_dict = lambda: squeezed  # type: ignore[method-assign,assignment]
    fields = {
        "shortconv.l_cache": 3,
        "attention.head_count_kv": [0, 1, 0],
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    write_model(model, tmp_path / "model.gguf", "lfm2", lambda name: "F32", fields)
    with pytest.raises(ModelLoadError, match=r"general\.architecture: expected a model without recurrent .*'lfm2'"):
        load_model(tmp_path / "model.gguf", ModelConfig())
