"""Rotary embeddings of type dynamic, which change for sequences that are longer than the model's limit: here there are none.

To see whether a sequence is longer, transformers reads positions from the device at each call: the host waits for that, and
no CUDA graph can capture it. So the embeddings are relabelled as a type that never changes.
"""

from __future__ import annotations

from typing import Any

from torch import nn

DYNAMIC = "dynamic"
# The type whose frequencies transformers never changes.
_NEVER_CHANGED = "default"


def stop_changes(model: nn.Module) -> None:
    """Have the embeddings rotate as up to the model's limit, whatever the model was called with before."""
    for module in model.modules():
        rotary: Any = module
        types = getattr(rotary, "rope_type", None)
        if types == DYNAMIC:
            rotary.rope_type = _NEVER_CHANGED
            _reset(rotary, "")
        elif isinstance(types, dict) and DYNAMIC in types.values():
            dynamic = [layer_type for layer_type, each in types.items() if each == DYNAMIC]
            rotary.rope_type = {**types, **dict.fromkeys(dynamic, _NEVER_CHANGED)}
            for layer_type in dynamic:
                _reset(rotary, f"{layer_type}_")


def _reset(rotary: Any, prefix: str) -> None:
    frequencies = getattr(rotary, f"{prefix}inv_freq")
    original = getattr(rotary, f"{prefix}original_inv_freq")
    setattr(rotary, f"{prefix}inv_freq", original.to(frequencies.device, copy=True))
