"""A layer's arguments of attention beside query, key and value."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from radixkv.memory import LayerShape


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's options, and the current batch's rotation.

    Attributes:
        scale: scores are multiplied by it; not always ``key_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay (Gemma 2).
        sliding_window: how many tokens a row sees, itself included; None: all.
        sinks: ``[query heads]``, one logit per head that takes part in the softmax and has no value (gpt-oss).
        rotary: cosines and sines ``[rows, rotary dim]`` by which attention rotates queries and new keys, in the form of
            `radixkv_kernels.rotate_and_write`; None: they are rotated already. Only for Triton's backend.
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None


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
