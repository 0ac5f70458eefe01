"""The parts of an attention layer that is made as Llama's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """What a layer computes with, besides its attention function.

    Attributes:
        projections: of queries, keys and values, and that of the output.
        norms: of queries and of keys; None: they are not normed.
        head_dim: size of a head.
        layer_idx: the layer's index.
    """

    projections: tuple[Any, Any, Any, Any]
    norms: tuple[Any, Any] | None
    head_dim: int
    layer_idx: int


def attention_parts(module: nn.Module) -> AttentionParts | None:
    """The parts of an attention layer; None: it lacks one, or others have parameters."""
    children = dict(module.named_children())
    query, key, value, output = (children.pop(f"{name}_proj", None) for name in "qkvo")
    query_norm, key_norm = (children.pop(f"{name}_norm", None) for name in "qk")
    head_dim, layer_idx = (getattr(module, name, None) for name in ("head_dim", "layer_idx"))
    if query is None or key is None or value is None or output is None or (query_norm is None) != (key_norm is None):
        return None
    if not isinstance(head_dim, int) or not isinstance(layer_idx, int):
        return None
    if any(True for child in children.values() for _ in child.parameters()):
        return None
    norms = None if query_norm is None else (query_norm, key_norm)
    return AttentionParts((query, key, value, output), norms, head_dim, layer_idx)
