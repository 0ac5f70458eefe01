"""How a GGUF file says that rotary embeddings are scaled, of which transformers' converter reads nothing."""

from __future__ import annotations

import math
from typing import Any

import gguf
import numpy as np

from radixkv.errors import ModelLoadError

_FACTORS = "rope_freqs.weight"
# Of Llama 3.1 and later: what llama.cpp's converter makes factors from. The largest is the model's own.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
# The one whose scaling transformers reads.
_READ_BY_TRANSFORMERS = "gpt-oss"


def apply_scaling(reader: gguf.GGUFReader, config: Any) -> None:
    """Write a file's scaling of rotary embeddings into the configuration that transformers has made of it.

    Args:
        reader: of the file.
        config: a `transformers.PretrainedConfig`; its ``rope_parameters`` are changed.

    Raises:
        ModelLoadError: they are scaled in another way than Llama 3.1's.
    """
    architecture = str(reader.fields["general.architecture"].contents())
    scaling = reader.fields.get(f"{architecture}.rope.scaling.type")
    if architecture != _READ_BY_TRANSFORMERS and scaling is not None and scaling.contents() != "none":
        factor = reader.fields.get(f"{architecture}.rope.scaling.factor")
        if factor is None or factor.contents() != 1:
            raise ModelLoadError(f"rope.scaling.type: expected 'none' in a GGUF file, got {scaling.contents()!r}")
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    others = sorted(name for name in tensors if name.startswith("rope_factors_"))
    if others:
        raise ModelLoadError(f"{others[0]}: expected no factors of rotary embeddings but {_FACTORS} in a GGUF file")
    if _FACTORS not in tensors or (tensors[_FACTORS] == 1).all():
        return
    factors = np.asarray(tensors[_FACTORS], dtype=np.float64)
    base = config.rope_parameters.get("rope_theta")
    largest = float(factors.max())
    if base is None or not np.allclose(factors, _llama3_factors(len(factors), base, largest), rtol=1e-3):
        raise ModelLoadError(f"{_FACTORS}: expected factors as Llama 3.1 has them, got others, up to {largest:g}")
    config.rope_parameters = {**config.rope_parameters, **_LLAMA3, "rope_type": "llama3", "factor": largest}


def _llama3_factors(count: int, base: float, largest: float) -> np.ndarray[Any, Any]:
    """What frequencies are divided by: those of long waves by the largest, of short ones by 1."""
    waves = 2 * math.pi * base ** (np.arange(count) / count)
    low, high = _LLAMA3["low_freq_factor"], _LLAMA3["high_freq_factor"]
    share = np.clip((_LLAMA3["original_max_position_embeddings"] / waves - low) / (high - low), 0, 1)
    return 1 / ((1 - share) / largest + share)
