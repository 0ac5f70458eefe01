"""RMS norms (Zhang and Sennrich 2019)."""

from __future__ import annotations

import torch
from torch import nn

from radixkv_cpu import rms_norm

_EPSILON_NAMES = ("variance_epsilon", "eps", "epsilon")


class NativeRMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + epsilon) * scale`` over the last dimension.

    Args:
        scale: float32 ``[dim]``.
        dtype: of the module that it replaces, for models that read it.
    """

    def __init__(self, scale: torch.Tensor, epsilon: float, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale = scale
        self.epsilon = epsilon
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.scale, self.epsilon)


def native_norms(module: nn.Module) -> list[NativeRMSNorm]:
    """The RMS norms that this module may be, by its parameters: some multiply by the weight, some by the weight plus one."""
    weight = getattr(module, "weight", None)
    epsilons = [getattr(module, name) for name in _EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
    # A weight of one dimension, and not the empty one of a norm that has been replaced.
    if not isinstance(weight, torch.Tensor) or weight.dim() != 1 or not weight.numel() or not epsilons:
        return []
    if len(list(module.parameters())) > 1 or weight.device.type != "cpu":
        return []
    scale = weight.detach().float()
    return [NativeRMSNorm((scale + shift).contiguous(), epsilons[0], weight.dtype) for shift in (0.0, 1.0)]
