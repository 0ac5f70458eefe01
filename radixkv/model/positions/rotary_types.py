"""The types by which transformers' rotary embeddings rotate: one for all layers, or one for each type of layers.

Embeddings of some types change their frequencies with the longest sequence of a batch, and a cached key would then depend on
what ran beside it. `fix` relabels them as a type that never changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

DYNAMIC = "dynamic"
NEVER_CHANGED = "default"
"""The type whose frequencies transformers never changes."""


def layers_of_type(module: nn.Module, rope_type: str) -> list[str | None]:
    """The types of layers that a module rotates by ``rope_type``; None among them: it rotates all layers alike."""
    types = getattr(module, "rope_type", None)
    if isinstance(types, str):
        return [None] if types == rope_type else []
    return [layer_type for layer_type, each in types.items() if each == rope_type] if isinstance(types, dict) else []


def fix(rotary: nn.Module, layer_types: Sequence[str | None]) -> None:
    """Have a rotary embedding change its frequencies for these types of layers no more.

    Args:
        rotary: is changed.
        layer_types: from `layers_of_type`.
    """
    module: Any = rotary
    module.rope_type = (
        NEVER_CHANGED if None in layer_types else {**module.rope_type, **dict.fromkeys(layer_types, NEVER_CHANGED)}
    )


def prefix_of(layer_type: str | None) -> str:
    """What the names of a rotary embedding's frequencies for a type of layers begin with."""
    return "" if layer_type is None else f"{layer_type}_"


@torch.inference_mode(False)
def restore_frequencies(rotary: nn.Module, layer_type: str | None) -> None:
    """Undo what changed the frequencies for a type of layers, such as a call with a long sequence."""
    prefix = prefix_of(layer_type)
    frequencies, original = (getattr(rotary, f"{prefix}{name}") for name in ("inv_freq", "original_inv_freq"))
    setattr(rotary, f"{prefix}inv_freq", original.to(frequencies.device, copy=True))


def fix_dynamic(model: nn.Module) -> None:
    """Rotate by type dynamic as for sequences up to the model's limit, whatever the model was called with before.

    Its frequencies change for longer sequences, of which there are none here. To see whether there is one, transformers
    reads positions from the device at each call: the host waits, and no CUDA graph can capture it.
    """
    for module in model.modules():
        layer_types = layers_of_type(module, DYNAMIC)
        if layer_types:
            fix(module, layer_types)
        for layer_type in layer_types:
            restore_frequencies(module, layer_type)
