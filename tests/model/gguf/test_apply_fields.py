"""What single fields of a GGUF file change in the configuration that transformers makes of it, and what they may not say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import gguf
import pytest
import transformers

from radixkv.model.gguf.conversion import UnreadableGgufError
from radixkv.model.gguf.fields import Fields, apply_fields


def apply(architecture: str, name: str, said: dict[str, Any], **options: Any) -> Any:
    """A configuration of transformers, changed by fields that are named without the architecture's name."""
    config = transformers.AutoConfig.for_model(name, **options)
    contents = {"general.architecture": architecture}
    contents |= {key if key.startswith("tokenizer.") else f"{architecture}.{key}": said[key] for key in said}
    fields = {key: SimpleNamespace(contents=lambda value=value: value) for key, value in contents.items()}
    apply_fields(Fields(cast(gguf.GGUFReader, SimpleNamespace(fields=fields))), config)
    return config


@pytest.mark.parametrize(
    ("architecture", "name", "said", "changed"),
    [
        ("qwen3moe", "qwen3_moe", {"expert_weights_norm": True}, {"norm_topk_prob": True}),
        ("qwen3moe", "qwen3_moe", {"expert_feed_forward_length": 48}, {"moe_intermediate_size": 48}),
        ("qwen2moe", "qwen2_moe", {"expert_shared_feed_forward_length": 48}, {"shared_expert_intermediate_size": 48}),
        ("llama", "llama", {"context_length": 100}, {"max_position_embeddings": 100}),
        ("gemma2", "gemma2", {"attn_logit_softcapping": 0.0}, {"attn_logit_softcapping": None}),
        ("gemma2", "gemma2", {}, {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}),
        # Heads of two sizes, of which the file says that of full layers.
        (
            "gemma4",
            "gemma4_text",
            {"attention.key_length": 512, "attention.sliding_window": 12},
            {"sliding_window": 12},
        ),
        ("phi3", "phi3", {"attention.sliding_window": 0}, {"sliding_window": None}),
    ],
)
def test_a_field_is_written_into_the_configuration(
    architecture: str, name: str, said: dict[str, Any], changed: dict[str, Any]
) -> None:
    config = apply(architecture, name, said)
    assert {attribute: getattr(config, attribute) for attribute in changed} == changed


@pytest.mark.parametrize(
    ("pattern", "full"), [(3, {2, 5}), (0, set()), ([True] * 6 + [False], {6})], ids=["3", "all slide", "each"]
)
def test_a_pattern_says_which_layers_slide(pattern: int | list[bool], full: set[int]) -> None:
    """Either the last of so many layers is full, or it is said of each."""
    said = {"attention.sliding_window": 12, "attention.sliding_window_pattern": pattern}
    config = apply("gemma3", "gemma3_text", said, num_hidden_layers=7)
    assert {layer for layer, kind in enumerate(config.layer_types) if kind == "full_attention"} == full
    assert config.sliding_window == 12


@pytest.mark.parametrize(
    ("architecture", "name", "said", "message"),
    [
        (
            "llama",
            "llama",
            {"rope.freq_base": 5.0, "rope.freq_base_swa": 7.0},
            r"rope\.freq_base_swa: expected rope\.freq_base, 5\.0,",
        ),
        (
            "llama",
            "llama",
            {"attention.sliding_window": 12, "attention.sliding_window_pattern": 2},
            r"attention\.sliding_window_pattern: expected its absence,",
        ),
        ("llama", "llama", {"attn_logit_softcapping": 5.0}, r"attn_logit_softcapping: expected its absence, or 0,"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(
    architecture: str, name: str, said: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        UnreadableGgufError, match=rf"^{architecture}\.{message} for transformers' {name} knows no other"
    ):
        apply(architecture, name, said)


def test_what_says_that_nothing_is_changed_is_not_refused() -> None:
    said = {
        **dict.fromkeys(("attention.clamp_kqv", "attention.max_alibi_bias", "router_logit_softcapping"), 0.0),
        **dict.fromkeys(("embedding_scale", "expert_weights_scale", "logit_scale", "expert_group_count"), 1),
        "attn_logit_softcapping": 0.0,
    }
    assert not hasattr(apply("llama", "llama", said), "attn_logit_softcapping")


def test_a_token_that_transformers_ends_an_answer_at_still_does() -> None:
    said = {"tokenizer.ggml.eos_token_id": 4, "tokenizer.ggml.eot_token_id": 7}
    assert apply("llama", "llama", said, eos_token_id=[2, 4]).eos_token_id == [2, 4, 7]
