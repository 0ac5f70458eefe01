"""`nn.Linear` over packed weights."""

from __future__ import annotations

import torch
from torch import nn

from radixkv.model.native.weights import WeightKeeper, make_weight
from radixkv.model.replacement.replace_modules import is_plain_linear
from radixkv_cpu import is_packable


class NativeLinear(nn.Module):
    """``x @ weight.T + bias`` like the `nn.Linear` that it is made from. The plain weight is not kept.

    Args:
        keeper: of the weight; see `make_weight`.

    Attributes:
        packed: the weight and its bias.
    """

    def __init__(self, linear: nn.Linear, keeper: WeightKeeper | None = None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = make_weight([linear.weight], [linear.bias], keeper=keeper)
        # Some models read dtype or device of their layers' weights: an empty tensor has both without memory. Bert's kind
        # reads the bias of its head.
        self.weight = torch.empty(0, dtype=linear.weight.dtype)
        self.bias = linear.bias

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self.packed.multiply(input)


def is_replaceable(module: nn.Module) -> bool:
    """Whether a module is one that a `NativeLinear` can stand in for."""
    return is_plain_linear(module) and is_packable(module.weight)
