"""Rotary embeddings of type dynamic, which change for sequences longer than the model's limit. No sequence is longer here.

To see whether one is, transformers reads positions from the device at each call: the host waits, and no CUDA graph can
capture it. So the embeddings are relabelled as a type that never changes.
"""

from __future__ import annotations

from torch import nn

from radixkv.model.rotary_types import fix, layers_of_type, restore_frequencies

DYNAMIC = "dynamic"


def stop_changes(model: nn.Module) -> None:
    """Rotate as for sequences up to the model's limit, whatever the model was called with before."""
    for module in model.modules():
        layer_types = layers_of_type(module, DYNAMIC)
        if layer_types:
            fix(module, layer_types)
        for layer_type in layer_types:
            restore_frequencies(module, layer_type)
