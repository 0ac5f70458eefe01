"""Tiny random models of many architectures, built from configurations alone."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers

VOCAB_SIZE = 200
TOKENS = torch.arange(3, 40).unsqueeze(0)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
# Sizes that native code can pack bfloat16 weights in.
WIDE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "intermediate_size": 96,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
# Likewise, with experts.
WIDE_EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
_MOE: dict[str, Any] = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
# Groups of experts, some of which every token gets.
_ROUTED: dict[str, Any] = {
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    **_MOE,
}
_MLA: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    **_ROUTED,
}
# A small window, so that short prompts reach beyond it. Only where the architecture has one: `generate` believes the
# configuration even where the model's own layers ignore it.
_WINDOW = {"sliding_window": 12}
_ALTERNATING = {**_WINDOW, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}

SUPPORTED: dict[str, dict[str, Any]] = {
    "afmoe": _MOE,
    "apertus": {},
    "arcee": {},
    "bert": {"is_decoder": True},
    "biogpt": {"num_key_value_heads": 4},
    "codegen": {"n_embd": 32, "n_head": 4, "rotary_dim": 4, "n_ctx": 512},
    "cohere": {},
    "cohere2": _ALTERNATING,
    "cohere2_moe": {**_MOE, **_ALTERNATING},
    "cwm": _ALTERNATING,
    "deepseek_v2": _MLA,
    "deepseek_v3": _MLA,
    "dots1": {**_ROUTED, **_ALTERNATING},
    "ernie4_5": {},
    "ernie4_5_moe": {**_MOE, "moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1},
    "exaone4": {**_ALTERNATING, "sliding_window_pattern": 2},
    "exaone_moe": {**_MOE, **_ALTERNATING, "sliding_window_pattern": 2},
    "flex_olmo": _MOE,
    "gemma": {},
    # With one matrix for both ends, the likeliest token would be the one just read, whatever it attends to.
    "gemma2": {**_ALTERNATING, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    "gemma3_text": {**_ALTERNATING, "query_pre_attn_scalar": 8, "tie_word_embeddings": False},
    # The last layers attend to keys and values of earlier ones.
    "gemma3n_text": {
        **_WINDOW,
        "num_hidden_layers": 4,
        "intermediate_size": [48] * 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
    },
    # Full layers have larger heads than sliding ones, and the last two layers share.
    "gemma4_text": {
        **_WINDOW,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "global_head_dim": 16,
        "num_kv_shared_layers": 2,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "hidden_size_per_layer_input": 8,
    },
    "glm": {},
    "glm4": {},
    "glm4_moe": _ROUTED,
    "glm4_moe_lite": _MLA,
    "gpt2": {"num_key_value_heads": 4},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neox": {"num_key_value_heads": 4},
    "gpt_oss": {**_MOE, **_ALTERNATING},
    "gptj": {"n_embd": 32, "n_head": 4, "rotary_dim": 4},
    "granite": {},
    "granitemoe": _MOE,
    "granitemoeshared": {**_MOE, "shared_intermediate_size": 24},
    "helium": {},
    "hunyuan_v1_dense": {},
    "jetmoe": {**_MOE, "kv_channels": 8},
    "llama": {},
    # Layers with a window have sinks, and other numbers of heads than full ones.
    "mimo_v2_flash": {**_ROUTED, **_ALTERNATING},
    "minimax_m2": _MOE,
    "ministral": _ALTERNATING,
    # Queries are scaled by their positions.
    "ministral3": {
        **_WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.5,
        },
    },
    "mistral": _WINDOW,
    "mixtral": {**_MOE, **_WINDOW},
    "modernbert-decoder": _ALTERNATING,
    "nanochat": {},
    "nemotron": {},
    "olmo": {},
    "olmo2": {},
    "olmo3": _ALTERNATING,
    "olmoe": _MOE,
    "opt": {"num_key_value_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32},
    "persimmon": {"num_key_value_heads": 4},
    "phi": {},
    "phi3": _WINDOW,
    "phimoe": {**_MOE, **_WINDOW},
    "qwen2": {},
    "qwen2_moe": {
        **_MOE,
        **_WINDOW,
        "use_sliding_window": True,
        "max_window_layers": 3,
        "shared_expert_intermediate_size": 24,
    },
    "qwen3": {},
    "qwen3_moe": _MOE,
    "seed_oss": {},
    "smollm3": {"layer_types": ["full_attention"] * 3},
    "solar_open": _ROUTED,
    "stablelm": {},
    "starcoder2": _WINDOW,
    "vaultgemma": _ALTERNATING,
}

# Rotation by three positions of a part of an image; those of a word are equal.
IN_SPACE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}}

# Models that also see images or hear, by what is particular of their texts.
MULTIMODAL: dict[str, dict[str, Any]] = {
    "gemma3": SUPPORTED["gemma3_text"],
    "glm4v": IN_SPACE,
    # What sees has an attention that cannot be replaced.
    "got_ocr2": {},
    "internvl": {},
    "llava": {},
    "mistral3": _WINDOW,
    # It passes positions on without naming them.
    "moss_transcribe_diarize": {},
    "qwen2_5_vl": IN_SPACE,
    "qwen3_vl": IN_SPACE,
    "smolvlm": {},
    # What hears knows fewer attention functions than what reads.
    "vibevoice_asr": {},
    # It computes the logits of all tokens.
    "video_llama_3": {},
    "voxtral": {},
}
# What sees or hears is never called; these are all the names that its sizes have.
_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "depth": 2,
    "num_heads": 4,
    "out_hidden_size": 32,
    "num_filters": 2,
}

# Of the type longrope, with other factors beyond this length of a sequence.
ORIGINAL_LENGTH = 32


def _longrope(num_factors: int, **parameters: Any) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0 + 0.1 * index for index in range(num_factors)],
        "long_factor": [8.0 + 4.0 * index for index in range(num_factors)],
        "original_max_position_embeddings": ORIGINAL_LENGTH,
        **parameters,
    }


_ORIGINAL = {"original_max_position_embeddings": ORIGINAL_LENGTH}
_DEFAULT_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
}
_CONVOLUTION = {"layer_types": ["conv", "full_attention", "conv"]}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_expand": 2}
_QWEN3_5_MOE = {**_MOE, **_LINEAR, "shared_expert_intermediate_size": 24}

# With recurrent layers beside those that attend.
RECURRENT: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {
        **_MLA,
        "num_hidden_layers": 4,
        "layer_group_size": 2,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    # Both in each layer.
    "falcon_h1": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_ssm": 64, "mamba_d_state": 8},
    "granitemoehybrid": {
        **_MOE,
        **_MAMBA,
        "layers_block_type": ["mamba", "attention", "mamba"],
        "layer_types": ["mamba", "attention", "mamba"],
        "shared_intermediate_size": 48,
    },
    "kimi_linear": {
        **_MLA,
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    },
    "lara_mini": _QWEN3_5_MOE,
    "lfm2": _CONVOLUTION,
    "lfm2_moe": {**_MOE, **_CONVOLUTION, "num_dense_layers": 1},
    "lfm3": _CONVOLUTION,
    "nemotron_h": {
        **_MOE,
        "layers_block_type": ["linear_attention", "mlp", "full_attention", "moe"],
        "num_hidden_layers": None,
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
    },
    "olmo_hybrid": _LINEAR,
    "qwen3_5_moe_text": _QWEN3_5_MOE,
    "qwen3_5_text": _LINEAR,
    "qwen3_next": _QWEN3_5_MOE,
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid", "mamba"],
        "hybrid_layer_ids": [1],
        "num_mem_blocks": 1,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "mamba_ngroups": 1,
        "mamba_d_state": 8,
        "attention_head_dim": 16,
    },
}
# Likewise, where it also sees images.
RECURRENT_MULTIMODAL: dict[str, dict[str, Any]] = {"lfm2_vl": _CONVOLUTION, "qwen3_5": _LINEAR}

# By the architecture and, behind a "+", what is particular.
LONGROPE: dict[str, dict[str, Any]] = {
    "gemma3_text": {
        **SUPPORTED["gemma3_text"],
        "rope_parameters": {"full_attention": _longrope(4), "sliding_attention": _DEFAULT_ROPE},
    },
    "gemma3n_text": {
        **SUPPORTED["gemma3n_text"],
        "rope_parameters": {"full_attention": _longrope(4), "sliding_attention": _longrope(4, rope_theta=500.0)},
    },
    "llama": {"rope_parameters": _longrope(4, attention_factor=1.3)},
    "minicpm3": {**_MLA, "rope_parameters": _longrope(4)},
    "phi3": {**_ORIGINAL, "rope_parameters": _longrope(4)},
    "phi3+partial": {**_ORIGINAL, "partial_rotary_factor": 0.5, "rope_parameters": _longrope(2)},
    "phi3+wide": {**WIDE, **_ORIGINAL, "rope_parameters": _longrope(16)},
    "phimoe": {**_MOE, **_ORIGINAL, "rope_parameters": _longrope(4, short_mscale=1.1, long_mscale=1.4)},
}

_DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0}

# What configurations of an architecture may say besides; by the architecture and, behind a "+", what is particular.
VARIANTS: dict[str, dict[str, Any]] = {
    "bamba+attention": {"attn_layer_indices": [0, 1, 2], "mamba_n_heads": 8},
    "gpt2+cross_attention": {**SUPPORTED["gpt2"], "add_cross_attention": True},
    "granitemoehybrid+attention": {**_MOE, "layer_types": ["attention"] * 3, "mamba_n_heads": 8},
    "hunyuan_v1_dense+alpha": {"rope_parameters": {**_DYNAMIC, "factor": 1.0, "alpha": 1000.0}},
    "hunyuan_v1_moe+alpha": {**_MOE, "rope_parameters": {**_DYNAMIC, "factor": 1.0, "alpha": 1000.0}},
    "internlm3+dynamic": {"rope_parameters": {**_DYNAMIC, "factor": 6.0}},
    "jamba+attention": {**_MOE, "attn_layer_period": 1, "attn_layer_offset": 0},
    "llama+dynamic": {"rope_parameters": {**_DYNAMIC, "factor": 3.0}},
    "llama4_text+full": {
        **_MOE,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"] * 3,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": False,
    },
    # Its router reads a linear layer's weight without calling the layer.
    "longcat_flash": {
        **_MLA,
        "num_layers": 2,
        "num_hidden_layers": None,
        "ffn_hidden_size": 48,
        "expert_ffn_hidden_size": 24,
        "moe_topk": 2,
        "zero_expert_num": 2,
    },
    "nemotron_h+attention": {
        **_MOE,
        "layers_block_type": ["full_attention", "mlp", "full_attention", "moe"],
        "num_hidden_layers": None,
        "n_routed_experts": 4,
        "moe_shared_expert_intermediate_size": 24,
    },
    "phimoe+full": _MOE,
}

REFUSED: dict[str, dict[str, Any]] = {
    "bart": {
        "is_decoder": True,
        "is_encoder_decoder": False,
        "d_model": 32,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
        "num_hidden_layers": None,
    },
    "bert": {},
    "bloom": {"n_head": 4},
    # Tokens are attended to together with patches of them, of which there are fewer.
    "blt": {
        "encoder_hash_byte_group_vocab": VOCAB_SIZE,
        **{
            f"{part}_config": {
                "vocab_size": VOCAB_SIZE,
                "hidden_size": 32,
                "hidden_size_global": 32,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "intermediate_size": 48,
            }
            for part in ("patcher", "encoder", "decoder", "global")
        },
    },
    # Keys of its own choose which tokens are attended to.
    "deepseek_v32": {**_MLA, "index_topk": 8, "index_head_dim": 16, "index_n_heads": 2},
    # Its attention is called twice a layer.
    "diffllama": {},
    # What each key is worth is learned.
    "doge": {},
    "falcon": {"head_dim": None},
    # Its recurrent layers go on from a state with a single token only.
    "jamba": {**_MOE, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 4},
    "llama4_text": {**_MOE, "layer_types": ["chunked_attention", "full_attention", "chunked_attention"]},
    "llama4_text+tuning": {
        **_MOE,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention"] * 3,
        "no_rope_layers": [1, 0, 1],
        "attn_temperature_tuning": True,
    },
    "mamba2": {"num_heads": 8, "head_dim": 8, "expand": 2, "state_size": 8, "n_groups": 1},
    "minimax": {**_MOE, "layer_types": ["full_attention", "linear_attention", "full_attention"]},
    "mpt": {"d_model": 32, "n_heads": 4},
    # Its positions begin behind that of padding, though `generate` counts them from 0.
    "roberta": {"is_decoder": True, "pad_token_id": 1},
    "xglm": {"d_model": 32, "attention_heads": 4, "ffn_dim": 48, "num_layers": 2},
    # A convolution over keys, of which the configuration says nothing.
    "zaya": {**_MOE, "num_experts_per_tok": 1},
}


def build(name: str, options: dict[str, Any], seed: int = 0) -> transformers.PreTrainedModel:
    """A model of architecture ``name`` with random float32 weights, the same for the same seed.

    Args:
        name: what follows a "+" only tells two of an architecture apart.
    """
    options = {key: copy.deepcopy(value) for key, value in {**_COMMON, **options}.items() if value is not None}
    config = transformers.AutoConfig.for_model(name.partition("+")[0], **options)
    return _build(transformers.AutoModelForCausalLM, config, seed)


def build_multimodal(name: str, options: dict[str, Any] | None = None, **others: Any) -> transformers.PreTrainedModel:
    """A model that also sees images or hears, whose text has these options; None: those in `MULTIMODAL`.

    Args:
        others: what else its configuration says.
    """
    parts: dict[str, Any] = dict.fromkeys(transformers.CONFIG_MAPPING[name].sub_configs, _TOWER)
    # Only the files of Omni's thinkers give them one, without which they generate nothing.
    parts["vision_start_token_id"] = VOCAB_SIZE
    # Some configurations add to what they are given.
    parts["text_config"] = copy.deepcopy({**_COMMON, **(MULTIMODAL[name] if options is None else options)})
    config = transformers.AutoConfig.for_model(name, **{**parts, **others})
    return _build(transformers.AutoModelForMultimodalLM, config, seed=0)


def _build(auto_class: Any, config: Any, seed: int) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model: transformers.PreTrainedModel = auto_class.from_config(config, dtype=torch.float32)
    # Sinks, biases and norms begin as constants, which would hide mistakes with them.
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and ("sink" in key or "bias" in key):
                parameter.normal_(0, 0.5)
            elif parameter.dim() == 1 and "norm" in key:
                parameter.add_(torch.randn_like(parameter), alpha=0.5)
    model.generation_config.eos_token_id = None
    return model.eval()


def build_supported(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    return build(name, SUPPORTED[name], seed)


def build_longrope(name: str) -> transformers.PreTrainedModel:
    """A model of `LONGROPE`."""
    return build(name, LONGROPE[name])


def build_shallow(name: str) -> transformers.PreTrainedModel:
    """`build_supported` with as few layers as there are kinds of them, for tests that take long by the layer."""
    options = {**SUPPORTED, **RECURRENT}[name]
    if "num_hidden_layers" not in options:
        options = {**options, "num_hidden_layers": 2, "layer_types": options.get("layer_types", [])[:2] or None}
    return build(name, options)


def logits(model: Any) -> torch.Tensor:
    """Of `TOKENS`, by the model's own code."""
    with torch.inference_mode():
        return model(input_ids=TOKENS, use_cache=False).logits  # type: ignore[no-any-return]
