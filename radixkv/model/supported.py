"""Which models can run over the cache's blocks; those that would silently compute something else are refused."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import transformers

from radixkv.errors import UnsupportedModelError
from radixkv.model.logits_to_keep import has_logits_to_keep, head_of_all_rows
from radixkv.model.positions.longrope import LONGROPE, has_fixable_rotation
from radixkv.model.positions.rotary_types import DYNAMIC
from radixkv.model.recurrent import keeps_states

# Types of layers that keep of a sequence its keys and values, or nothing.
_SERVED_LAYERS = frozenset({"full_attention", "sliding_attention", "attention", "mlp", "moe"})
# Types of layers that keep states of it, and those that keep keys and values besides.
_RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "mamba"})
_MIXED_LAYERS = frozenset({"hybrid", "hybrid_sliding"})


def check_supported(model: transformers.PreTrainedModel, name: str) -> None:
    """Refuse models that would silently compute something else over KV cache blocks.

    Raises:
        UnsupportedModelError: the message says why.
    """
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnsupportedModelError(f"{name}: encoder-decoder models attend to more than their own prefix")
    if not model.can_generate():
        raise UnsupportedModelError(
            f"{name}: expected a model that generates text, with a head for causal language modelling, got a "
            f"{type(model).__name__}"
        )
    served = _SERVED_LAYERS | (_RECURRENT_LAYERS | _MIXED_LAYERS if any(map(keeps_states, model.modules())) else set())
    types = set(_layer_types(config))
    for layer_type in sorted(types - served):
        raise UnsupportedModelError(
            f"{name}: it has layers of type {layer_type!r}, expected layers that attend to all earlier tokens or to a "
            f"sliding window of them, or that keep states in transformers' caches{_hint(layer_type, config)}"
        )
    if types and types <= _RECURRENT_LAYERS:
        raise UnsupportedModelError(
            f"{name}: all of its layers are recurrent, expected some that attend to earlier tokens"
        )
    for rope in sorted(_rope_types(config) & _batch_dependent_ropes(model)):
        raise UnsupportedModelError(
            f"{name}: its rotary positions of type {rope!r} depend on the longest sequence of a batch, "
            "so cached keys could not be shared"
        )
    if getattr(config, "attn_temperature_tuning", False) and 0 in (getattr(config, "no_rope_layers", None) or ()):
        raise UnsupportedModelError(
            f"{name}: its layers without rotary positions scale queries by their row in a batch, not by their position "
            "(attn_temperature_tuning); false in its config.json changes nothing in sequences of up to "
            f"{getattr(config, 'floor_scale', 0)} tokens"
        )
    part = _part_that_reads_text(model)
    if not part._can_set_attn_implementation():
        raise UnsupportedModelError(
            f"{name}: the attention of {type(part).__name__} cannot be replaced by one over blocks, for transformers "
            f"{transformers.__version__} computes it in the model's own code instead of calling its AttentionInterface; a "
            "later release may call it, as 5.24 does for gptj and codegen"
        )
    # A model may pass positions on to that part without naming them.
    if not any("position_ids" in inspect.signature(each.forward).parameters for each in (model, part)):
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} counts positions itself (no argument position_ids), which a batch of several "
            "sequences does not allow"
        )
    if not has_logits_to_keep(model) and head_of_all_rows(model) is None:
        raise UnsupportedModelError(
            f"{name}: {type(model).__name__} cannot compute the logits of selected tokens only (no argument logits_to_keep, "
            "and no output head)"
        )


def has_recurrent_layers(config: Any) -> bool:
    """Whether a model of this configuration has layers that keep states."""
    return not (_RECURRENT_LAYERS | _MIXED_LAYERS).isdisjoint(_layer_types(config.get_text_config()))


def _hint(layer_type: str, config: Any) -> str:
    """What to do about layers of a type that is not served; empty: nothing."""
    size = getattr(config, "attention_chunk_size", None)
    if layer_type != "chunked_attention" or size is None:
        return ""
    return (
        f"; in sequences of up to {size} tokens, a config.json whose layer_types has 'full_attention' for each layer of "
        "this type gives the same"
    )


def _part_that_reads_text(model: transformers.PreTrainedModel) -> transformers.PreTrainedModel:
    """The outermost part that has the configuration of texts: others, such as those of images, may attend in any way."""
    text = model.config.get_text_config()
    parts = (each for each in model.modules() if isinstance(each, transformers.PreTrainedModel))
    return next((part for part in parts if part.config is text), model)


def _layer_types(config: Any) -> list[str]:
    types = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    has_state = any(hasattr(config, key) for key in ("mamba_d_state", "ssm_state_size", "state_size"))
    return types or ["mamba"] * has_state


def _batch_dependent_ropes(model: transformers.PreTrainedModel) -> set[str]:
    """Types by which rotation depends on the longest sequence in the batch, and so would a cached key."""
    found = set() if has_fixable_rotation(model) else {LONGROPE}
    has_limit = bool(getattr(model.config.get_text_config(), "max_position_embeddings", None))
    return found if has_limit else found | {DYNAMIC}


def _rope_types(config: Any) -> set[str]:
    """All rope types of a configuration; gemma3 and others nest them by layer type."""
    found: set[str] = set()
    pending = [getattr(config, "rope_parameters", None), getattr(config, "rope_scaling", None)]
    while pending:
        part = pending.pop()
        if isinstance(part, Mapping):
            found |= {str(part[key]) for key in ("rope_type", "type") if key in part}
            pending.extend(part.values())
    return found
