"""The parameters of a layer's attention beside query, key and value."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """One layer's options, and the current batch's rotation.

    Attributes:
        scale: scores are multiplied by it; not always ``key_dim ** -0.5``.
        softcap: scores become ``softcap * tanh(score / softcap)``; None: they stay (Gemma 2).
        sliding_window: how many tokens a row sees, itself included; None: all.
        sinks: ``[query heads]``, one logit per head that takes part in the softmax and has no value (gpt-oss).
        rotary: cosines and sines ``[rows, rotary dim]`` by which queries and new keys are yet to be rotated, in the form of
            `radixkv_kernels.rotate_and_write`; None: they are rotated already. Only for Triton's backend.
    """

    scale: float
    softcap: float | None = None
    sliding_window: int | None = None
    sinks: torch.Tensor | None = None
    rotary: tuple[torch.Tensor, torch.Tensor] | None = None
