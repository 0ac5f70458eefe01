"""Reads how a GGUF file scales rotary embeddings, which transformers' converter ignores."""

from __future__ import annotations

import math
import re
from types import MappingProxyType
from typing import Any

import gguf
import numpy as np

from radixkv.model.gguf.conversion import UnreadableGgufError
from radixkv.model.gguf.fields import Fields

_FACTORS = "rope_freqs.weight"
_ROTATION_TENSORS = re.compile(
    r"rope_freqs\.weight|(blk\.\d+\.)?rope_factors_(long|short)\.weight|blk\.\d+\.attn_rot_embd.*"
)
# Parameters of Llama 3.1 and later, from which llama.cpp's converter makes factors. The largest is the model's own.
_LLAMA3 = MappingProxyType({"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192})
# Architectures whose rotary embeddings transformers and llama.cpp scale alike, by the type of scaling.
_SCALED_ALIKE = MappingProxyType(
    {
        "linear": ("gemma2", "gemma3", "llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"),
        # By YaRN, llama.cpp would scale cosines and sines of gemma3's sliding layers, too.
        "yarn": ("llama", "qwen2", "qwen2moe", "qwen3", "qwen3moe"),
    }
)


def is_rotation(tensor_name: str) -> bool:
    """Whether a tensor of this name says how embeddings are rotated: read here, or what the rotary base says already."""
    return _ROTATION_TENSORS.fullmatch(tensor_name) is not None


def apply_scaling(reader: gguf.GGUFReader, fields: Fields, config: Any) -> None:
    """Write a file's scaling of rotary embeddings into the configuration that transformers has made of it.

    Args:
        reader: of the file.
        fields: of the file.
        config: a `transformers.PretrainedConfig`; its ``rope_parameters`` are changed.

    Raises:
        UnreadableGgufError: they are scaled in another way than linearly, by YaRN, or as Llama 3.1's are.
    """
    scaling = _scaling(fields)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    others = sorted(name for name in tensors if "rope_factors_" in name)
    if others:
        raise UnreadableGgufError(f"{others[0]}: expected no factors of rotary embeddings but {_FACTORS}")
    if _FACTORS in tensors and not (tensors[_FACTORS] == 1).all():
        if scaling:
            raise UnreadableGgufError(
                f"rope.scaling.type: expected 'none' beside {_FACTORS}, got {scaling['rope_type']!r}"
            )
        scaling = _llama3_scaling(np.asarray(tensors[_FACTORS], dtype=np.float64), config)
    if not scaling:
        return
    parameters = dict(config.rope_parameters)
    if "full_attention" in parameters:  # of sliding layers, no frequencies are scaled
        parameters["full_attention"] = {**parameters["full_attention"], **scaling}
    else:
        parameters.update(scaling)
    config.rope_parameters = parameters


def _scaling(fields: Fields) -> dict[str, Any]:
    """What the file's fields say, as transformers says it; empty: nothing is scaled."""
    factor = fields.get("rope.scaling.factor") or fields.get("rope.scale_linear") or 1.0
    kind = fields.get("rope.scaling.type") or "linear"  # llama.cpp's default
    attention_factor = fields.get("rope.scaling.attn_factor") or 1.0
    if kind != "yarn" and attention_factor != 1:
        raise UnreadableGgufError(
            f"{fields.architecture}.rope.scaling.attn_factor: expected its absence, or 1, without YaRN, "
            f"got {attention_factor:g}"
        )
    if kind == "none" or (kind == "linear" and factor == 1):
        return {}
    if fields.architecture not in _SCALED_ALIKE.get(kind, ()):
        possible = ["none", *(name for name, known in _SCALED_ALIKE.items() if fields.architecture in known)]
        raise UnreadableGgufError(
            f"{fields.architecture}.rope.scaling.type: expected {' or '.join(map(repr, possible))}, which transformers is "
            f"known to compute as llama.cpp does, got {kind!r}"
        )
    return {"rope_type": "linear", "factor": factor} if kind == "linear" else _yarn(fields, factor)


def _yarn(fields: Fields, factor: float) -> dict[str, Any]:
    """YaRN: cosines and sines are scaled, too, by 0.1 ln(factor) + 1, and by an ``attn_factor``."""
    attention_factor = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
    # llama.cpp takes these for granted in these architectures, whatever a file says, where transformers would not.
    granted = {
        "yarn_attn_factor": attention_factor,
        "yarn_beta_fast": 32,
        "yarn_beta_slow": 1,
        "yarn_ext_factor": 1,
        "yarn_log_multiplier": 0,
    }
    for name, only in granted.items():
        value = fields.get(f"rope.scaling.{name}")
        if value is not None and not math.isclose(value, only, rel_tol=1e-4):
            raise UnreadableGgufError(
                f"{fields.architecture}.rope.scaling.{name}: expected its absence, or {only:g}, for llama.cpp takes no other "
                f"for this architecture, got {value:g}"
            )
    original_length = fields.get("rope.scaling.original_context_length") or fields.get("context_length")
    return {
        "rope_type": "yarn",
        "factor": factor,
        "attention_factor": attention_factor * (fields.get("rope.scaling.attn_factor") or 1.0),
        "original_max_position_embeddings": original_length,
    }


def _llama3_scaling(factors: np.ndarray[Any, Any], config: Any) -> dict[str, Any]:
    base = config.rope_parameters.get("rope_theta")
    largest = float(factors.max())
    if base is None or not np.allclose(factors, _llama3_factors(len(factors), base, largest), rtol=1e-3):
        raise UnreadableGgufError(f"{_FACTORS}: expected factors as Llama 3.1 has them, got others, up to {largest:g}")
    return {**_LLAMA3, "rope_type": "llama3", "factor": largest}


def _llama3_factors(count: int, base: float, largest: float) -> np.ndarray[Any, Any]:
    """What frequencies are divided by: those of long waves by the largest, of short ones by 1."""
    waves = 2 * math.pi * base ** (np.arange(count) / count)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((_LLAMA3["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / largest + share)
