"""What attention takes beside queries, keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.memory import LayerShape

Rotary = tuple[torch.Tensor, torch.Tensor]
"""Cosines and sines ``[rows, rotary dim]`` of a batch's positions, in the form of `radixkv_kernels.rotate_and_write`."""


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
