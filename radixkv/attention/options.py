"""What a layer hands to attention: new tokens, and options that are the same for every batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixkv.memory import LayerShape

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[rows, rotary dim]`` of a batch's positions, in the form of `radixkv_kernels.rotate_and_write`."""


class NewTokens(NamedTuple):
    """What a layer computed of a batch's new tokens, from which attention begins.

    Attributes:
        query: ``[1, query heads, rows, key dim]``.
        key: ``[1, kv heads, rows, key dim]``.
        value: ``[1, kv heads, rows, value dim]``.
        rotary: by which queries and keys are rotated first, on a GPU; None, as always on a CPU: they are already.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    rotary: Rotary | None = None


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's options, the same for every batch.

    Attributes:
        scale: scores are multiplied by it; not always ``key_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay (Gemma 2).
        sliding_window: how many tokens a row sees, itself included; None: all.
        sinks: ``[query heads]``, one logit per head that takes part in the softmax and has no value (gpt-oss).
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The properties of a model's attention layer that decide which kernels it launches.

    Attributes:
        shape: of its keys and values.
        num_query_heads: of its queries.
        options: its own.
        rotary_dim: dimensions of a head that are rotated when new keys are stored; None: keys arrive rotated.
    """

    shape: LayerShape
    num_query_heads: int
    options: AttentionOptions
    rotary_dim: int | None = None
