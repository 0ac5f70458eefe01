"""Attention functions that do not attend: they note what layers pass, allocate what attention would, or mix no tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers

from radixkv.attention import AttentionLayer, NewTokens
from radixkv.errors import UnsupportedModelError
from radixkv.memory import LayerShape
from radixkv.model.attention_function import attention_by, layer_options, unsupported_reason


@contextmanager
def watch_layers(model: transformers.PreTrainedModel, name: str) -> Iterator[dict[int, AttentionLayer]]:
    """While the model runs, note what its layers pass to attention, which gives zeros.

    Args:
        name: of the model.

    Yields:
        By layer index, the layers in the order in which they are called.

    Raises:
        UnsupportedModelError: within, when a layer is called that cannot be served from blocks.
    """
    layers: dict[int, AttentionLayer] = {}

    def note(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        **given: Any,
    ) -> torch.Tensor:
        reason = unsupported_reason(module, query, key, attention_mask, given)
        if reason is not None:
            raise UnsupportedModelError(f"{name}: {reason}")
        if module.layer_idx in layers:
            raise UnsupportedModelError(
                f"{name}: its attention function is called twice for layer {module.layer_idx}, by one or by two modules"
            )
        shape = LayerShape(key.shape[1], key.shape[3], value.shape[3])
        options = layer_options(query.shape[-1], given, attention_mask)
        layers[module.layer_idx] = AttentionLayer(shape, query.shape[1], options)
        return zero_attention(query, value)

    with attention_by(model, note):
        yield layers


def diagonal_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """A stand-in for attention of each token to itself alone: it depends on query, key, value, and how they were rotated.

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


def zero_attention(query: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Zeros in the shape of what attention gives; the arguments are `diagonal_attention`'s."""
    return query.new_zeros(query.shape[0], query.shape[2], query.shape[1], value.shape[3])


def attend_itself(layer: int, new: NewTokens) -> torch.Tensor:
    """`diagonal_attention`, to find out whether anything but attention mixes tokens."""
    return diagonal_attention(new.query, new.key, new.value)


def attend_nothing(layer: int, new: NewTokens) -> torch.Tensor:
    """Zeros in the shape of the layer's result, to see what all the rest gives, compiles to, or takes of memory."""
    # Rotated queries take memory of their own while attention runs.
    _rotated = None if new.rotary is None else torch.empty_like(new.query)
    return zero_attention(new.query, new.value)
