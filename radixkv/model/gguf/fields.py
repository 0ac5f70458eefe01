"""Reads fields of a GGUF file that transformers' converter ignores for some architectures.

It leaves defaults in their place, which are those of one model: another rotary base, no window. Where a file says nothing,
the rules of llama.cpp hold, for which it was made.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import gguf

from radixkv.model.gguf.conversion import UnreadableGgufError


class Fields:
    """The fields of a GGUF file.

    Args:
        reader: of the file.

    Attributes:
        architecture: llama.cpp's name of the model's.
    """

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields
        self.architecture = str(self._fields["general.architecture"].contents())

    def get(self, name: str) -> Any:
        """The value of one of the architecture's fields, named without it; None: there is none."""
        return self.get_of_file(f"{self.architecture}.{name}")

    def get_of_file(self, name: str) -> Any:
        """The value of any field; None: there is none."""
        field = self._fields.get(name)
        return None if field is None else field.contents()


# Names that configurations have for what a field says.
_ATTRIBUTES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "attention.layer_norm_epsilon": ("layer_norm_eps", "layer_norm_epsilon", "norm_eps", "norm_epsilon"),
        "context_length": ("max_position_embeddings",),
        "expert_feed_forward_length": ("moe_intermediate_size",),
        "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
        "expert_weights_norm": ("norm_topk_prob",),
    }
)
_SOFTCAPS = ("attn_logit_softcapping", "final_logit_softcapping")
# Fields that no model made of a file supports: only with these values do they change nothing.
_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.output_scale": (0, 1),
        "attention.temperature_scale": (0,),
        "embedding_scale": (0, 1),
        "expert_group_count": (0, 1),
        "expert_weights_scale": (0, 1),
        "logit_scale": (0, 1),
        "residual_scale": (0, 1),
        "rope.dimension_sections": (),
        "rope.scaling.alpha": (0,),
        "router_logit_softcapping": (0,),
        "swiglu_clamp_exp": (0,),
    }
)
# Every layer of these has the window that their configuration names; of others, those of the type "sliding_attention".
_WINDOW_EVERYWHERE = frozenset({"phi3", "starcoder2"})
# Layers of the one size whose queries are scaled by the hidden size a head, which no field has.
_LAYERS_OF_27B = MappingProxyType({"gemma2": 46, "gemma3": 62})
# Full layers have heads, rotations and a width of experts of their own, which transformers' converter reads.
_NOT_UNIFORM = "gemma4"
_ENDS = ("eos", "eot", "eom")
# Control tokens that end turns, which llama.cpp recognizes by their texts where no field names them.
_ENDS_OF_TURNS = frozenset({"<end_of_turn>", "<|end|>", "<|eom_id|>", "<|eot_id|>", "<|im_end|>"})


def apply_fields(fields: Fields, config: Any) -> None:
    """Write what a file says into the configuration that transformers has made of it.

    Args:
        fields: of the file.
        config: a `transformers.PretrainedConfig`, which is changed. Rotations that are scaled are
            `radixkv.model.gguf.rotation`'s.

    Raises:
        UnreadableGgufError: a model of this configuration cannot compute what a field says.
    """
    for name, neutral in _NEUTRAL.items():
        value = fields.get(name)
        if value is not None and value not in neutral:
            raise _unknown(fields, name, f"its absence, or one of {list(neutral)}", config)
    if fields.architecture != _NOT_UNIFORM:
        for name, attributes in _ATTRIBUTES.items():
            for attribute in attributes:
                if fields.get(name) is not None and hasattr(config, attribute):
                    setattr(config, attribute, fields.get(name))
        _apply_heads(fields, config)
        _apply_rotation(fields, config)
    for name in _SOFTCAPS:
        value = fields.get(name)
        if value and not hasattr(config, name):
            raise _unknown(fields, name, "its absence, or 0", config)
        if value is not None and hasattr(config, name):
            setattr(config, name, value or None)
    _apply_windows(fields, config)
    _apply_ends(fields, config)


def check_rotary_dim(fields: Fields, model: Any) -> None:
    """Refuse a file in which other dimensions of a head are rotated than the model made of it rotates.

    Raises:
        UnreadableGgufError: says how many.
    """
    dimensions = fields.get("rope.dimension_count")
    if dimensions is None or fields.architecture == _NOT_UNIFORM:
        return
    rotated = {2 * len(buffer) for name, buffer in model.named_buffers() if name.endswith("inv_freq")}
    if rotated - {dimensions}:
        raise _unknown(fields, "rope.dimension_count", str(max(rotated)), model.config)


def _apply_heads(fields: Fields, config: Any) -> None:
    head_dim = fields.get("attention.key_length")
    if head_dim is not None and hasattr(config, "head_dim"):
        config.head_dim = head_dim
    head_dim = _head_dim(config)
    if hasattr(config, "query_pre_attn_scalar"):
        of_27b = config.num_hidden_layers == _LAYERS_OF_27B.get(fields.architecture)
        config.query_pre_attn_scalar = config.hidden_size // config.num_attention_heads if of_27b else head_dim
    scale = fields.get("attention.scale")
    own = getattr(config, "query_pre_attn_scalar", head_dim) ** -0.5
    if scale and abs(scale - own) > 1e-4 * own:
        raise _unknown(fields, "attention.scale", f"{own:g}", config)


def _apply_rotation(fields: Fields, config: Any) -> None:
    parameters = getattr(config, "rope_parameters", None)
    if not parameters:
        return
    parameters = dict(parameters)
    base, local_base = fields.get("rope.freq_base"), fields.get("rope.freq_base_swa")
    if "full_attention" in parameters:
        for layer_type, value in (("full_attention", base), ("sliding_attention", local_base)):
            if value is not None:
                parameters[layer_type] = {**parameters[layer_type], "rope_theta": value}
    else:
        if local_base is not None and local_base != base:
            raise _unknown(fields, "rope.freq_base_swa", f"rope.freq_base, {base}", config)
        if base is not None:
            parameters["rope_theta"] = base
        dimensions = fields.get("rope.dimension_count")
        if dimensions is not None and "partial_rotary_factor" in parameters:
            parameters["partial_rotary_factor"] = dimensions / _head_dim(config)
    config.rope_parameters = parameters


def _apply_windows(fields: Fields, config: Any) -> None:
    """Which layers attend to how many tokens."""
    window = fields.get("attention.sliding_window")
    if config.model_type in _WINDOW_EVERYWHERE:
        config.sliding_window = window or None
        return
    types = list(getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers)
    if fields.architecture == "gemma3" and not window:
        types = ["full_attention"] * len(types)
    pattern = fields.get("attention.sliding_window_pattern")
    if pattern is not None and window:
        if isinstance(pattern, int):  # the last of so many layers is full
            pattern = [not pattern or (layer + 1) % pattern != 0 for layer in range(len(types))]
        types = ["sliding_attention" if slides else "full_attention" for slides in pattern]
    if "sliding_attention" not in types and window and window < (fields.get("context_length") or window):
        raise _unknown(fields, "attention.sliding_window", "its absence, or 0", config)
    if types != ["full_attention"] * len(types) and not hasattr(config, "sliding_window"):
        raise _unknown(fields, "attention.sliding_window_pattern", "its absence", config)
    if getattr(config, "layer_types", None):
        config.layer_types = types
    if "sliding_attention" in types and window:
        config.sliding_window = window


def _apply_ends(fields: Fields, config: Any) -> None:
    """Name all tokens that end an answer: some models end it by another one than a text, and llama.cpp stops at any."""
    ids = [fields.get_of_file(f"tokenizer.ggml.{name}_token_id") for name in _ENDS]
    tokens = fields.get_of_file("tokenizer.ggml.tokens") or []
    kinds = fields.get_of_file("tokenizer.ggml.token_type") or []
    for token_id, (token, kind) in enumerate(zip(tokens, kinds, strict=False)):
        if kind == gguf.TokenType.CONTROL and token in _ENDS_OF_TURNS:
            ids.append(token_id)
    ends = [*dict.fromkeys(token_id for token_id in ids if token_id is not None)]
    if len(ends) > 1:
        known = getattr(config, "eos_token_id", None)
        known = known if isinstance(known, list) else []
        config.eos_token_id = [*dict.fromkeys([*known, *ends])]


def _head_dim(config: Any) -> int:
    head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return head_dim


def _unknown(fields: Fields, name: str, expected: str, config: Any) -> UnreadableGgufError:
    return UnreadableGgufError(
        f"{fields.architecture}.{name}: expected {expected}, for transformers' {config.model_type} knows no other, "
        f"got {fields.get(name)!r:.80}"
    )
