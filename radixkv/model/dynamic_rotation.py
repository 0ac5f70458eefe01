"""Rotary embeddings of type dynamic, which change for sequences that are longer than the model's limit: here there are none.

To see whether a sequence is longer, transformers reads positions from the device at each call: the host waits for that, and
no CUDA graph can capture it. So the embeddings are relabelled as a type that never changes.
"""

from __future__ import annotations

from torch import nn

from radixkv.model.rotary_types import fix, layers_of_type, restore_frequencies

DYNAMIC = "dynamic"


def stop_changes(model: nn.Module) -> None:
    """Have the embeddings rotate as up to the model's limit, whatever the model was called with before."""
    for module in model.modules():
        layer_types = layers_of_type(module, DYNAMIC)
        if layer_types:
            fix(module, layer_types)
        for layer_type in layer_types:
            restore_frequencies(module, layer_type)
