"""Attention functions that do not attend: they note what layers pass, take the memory it would take, or mix no tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.attention import AttentionOptions
from radixkv.errors import UnsupportedModelError
from radixkv.memory import LayerShape


@dataclass(frozen=True, slots=True)
class ProbedLayer:
    """What an attention layer of the model was seen to pass to its attention function."""

    shape: LayerShape
    num_query_heads: int
    options: AttentionOptions


class LayerProbe:
    """Notes the layers of a model while it runs: configurations do not give every layer's shapes.

    Attributes:
        layers: by layer index, in the order in which they were called.
    """

    def __init__(self) -> None:
        self.layers: dict[int, ProbedLayer] = {}

    def attend(
        self, layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
    ) -> torch.Tensor:
        """Zeros in the shape of the layer's result.

        Raises:
            UnsupportedModelError: there was a layer of this index already.
        """
        if layer_idx in self.layers:
            raise UnsupportedModelError(f"two attention layers of the model have the index {layer_idx}")
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        self.layers[layer_idx] = ProbedLayer(shape, query.shape[1], options)
        return _zeros(query, value)


def see_itself(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """What each token sees of itself alone, which its query, key and value all change, and how they were rotated.

    Args:
        query: ``[1, heads, tokens, dim]``.
        key: ``[1, kv heads, tokens, dim]``.
        value: ``[1, kv heads, tokens, value dim]``.

    Returns:
        ``[1, tokens, heads, value dim]``.
    """
    group = query.shape[1] // key.shape[1]
    # Not the product of query and key: at equal positions it is the same, however both were rotated.
    ramp = torch.linspace(-1, 1, query.shape[-1], device=query.device)
    scores = (query.float() * ramp + key.float().repeat_interleave(group, dim=1) * ramp**2).mean(-1, keepdim=True)
    output = value.repeat_interleave(group, dim=1) * (1 + torch.tanh(scores)).to(value.dtype)
    return output.transpose(1, 2).contiguous()


def attend_itself(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """`see_itself`, to find out whether anything but attention mixes tokens."""
    return see_itself(query, key, value)


def attend_nothing(
    layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, options: AttentionOptions
) -> torch.Tensor:
    """Zeros in the shape of the layer's result, to measure what all the rest takes."""
    # Rotated queries take memory of their own while attention runs.
    _rotated = None if options.rotary is None else torch.empty_like(query)
    return _zeros(query, value)


def _zeros(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])
