"""Linear layers of a GPU's model merged where they read the same input: query, key and value; gate and up; latent attention's
two that compress a token.

With few rows each product is a launch that is over before it has filled the GPU, key and value projections first of all.
Merged, the weights lie one behind the other, and each layer's own becomes a view of them, so no memory is taken twice. What
it gains together with compiled layers and fused rotation is in `radixkv.model.graphs.compiled_layers`; alone, it has not been
measured yet.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional

from radixkv.model.replacement.replace_modules import is_plain_linear, replace_modules
from radixkv.model.replacement.shared_input import FusedProduct, concatenated_bias, groups_by_input


class MergedLinear(nn.Linear):
    """An `nn.Linear` whose output is a part of a product's. The model must not be moved any more.

    Args:
        linear: what it stands for, and has the parameters of.
        product: that has its output.
        index: of its part.
    """

    def __init__(self, linear: nn.Linear, product: FusedProduct, index: int) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._product = product
        self._index = index

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._product.output(input, self._index)


class _MergedProduct(FusedProduct):
    """One product with the weights and biases of several linears, which become views of its own."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        sizes = [linear.out_features for linear in linears]
        super().__init__(sizes)
        self._weight = torch.cat([linear.weight.detach() for linear in linears])
        self._bias = concatenated_bias(linears)
        for linear, part in zip(linears, self._weight.split(sizes), strict=True):
            linear.weight.data = part
        if self._bias is not None:
            for linear, part in zip(linears, self._bias.split(sizes), strict=True):
                if linear.bias is not None:
                    linear.bias.data = part

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(x, self._weight, self._bias)


def merge_linears(model: nn.Module, run_once: Callable[[], object]) -> int:
    """Merge every `nn.Linear` with those that read the same input; returns how many were merged.

    Args:
        run_once: runs the model on any input.
    """
    linears = [module for module in model.modules() if is_plain_linear(module)]
    merged: dict[nn.Module, MergedLinear] = {}
    with torch.no_grad():
        for group in groups_by_input(model, linears, run_once):
            if len(group) > 1:
                product = _MergedProduct(group)
                merged |= {linear: MergedLinear(linear, product, index) for index, linear in enumerate(group)}
    replace_modules(model, merged)
    return len(merged)
