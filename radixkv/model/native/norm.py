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
    """The RMS norms that a candidate may be: some multiply by the weight, some by the weight plus one."""
    weight = module.get_parameter("weight").detach()
    scale, (epsilon, *_) = weight.float(), _epsilons(module)
    return [NativeRMSNorm((scale + shift).contiguous(), epsilon, weight.dtype) for shift in (0.0, 1.0)]


def is_candidate(module: nn.Module) -> bool:
    """Whether the module has the parameter that a `NativeRMSNorm` is made of, and no other."""
    match dict(module.named_parameters()):
        case {"weight": weight, **others}:
            return not others and weight.dim() == 1 and len(weight) > 0 and weight.is_cpu and bool(_epsilons(module))
    return False


def _epsilons(module: nn.Module) -> list[float]:
    return [getattr(module, name) for name in _EPSILON_NAMES if isinstance(getattr(module, name, None), float)]
