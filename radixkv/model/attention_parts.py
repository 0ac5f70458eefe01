"""The parts of an attention layer that is made as Llama's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn


@dataclass(frozen=True, slots=True)
class AttentionParts:
    """What a layer computes with, besides its attention function.

    Attributes:
        projections: of queries, keys and values, and that of the output.
        norms: of queries and of keys; or none.
        head_dim: size of a head.
    """

    projections: tuple[nn.Module, nn.Module, nn.Module, nn.Module]
    norms: tuple[nn.Module, ...]
    head_dim: int


def attention_parts(module: nn.Module) -> AttentionParts | None:
    """The parts of an attention layer; None: it lacks one, or others have parameters."""
    children = dict(module.named_children())
    query, key, value, output = (children.pop(f"{name}_proj", None) for name in "qkvo")
    norms = tuple(children.pop(name) for name in ("q_norm", "k_norm") if name in children)
    head_dim = getattr(module, "head_dim", None)
    if query is None or key is None or value is None or output is None or len(norms) == 1:
        return None
    if not isinstance(head_dim, int) or not isinstance(getattr(module, "layer_idx", None), int):
        return None
    if any(True for child in children.values() for _ in child.parameters()):
        return None
    return AttentionParts((query, key, value, output), norms, head_dim)
