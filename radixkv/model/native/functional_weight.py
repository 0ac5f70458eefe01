"""Weights that modules pass to `torch.nn.functional.linear`: mostly routers of mixtures of experts.

Such a module is not an `nn.Linear`, and the rest of what it computes differs by model. So its weight is replaced by one for
which `linear` calls native code. That gives a row the same result to the last bit whatever rows are beside it; torch does
not, and a last bit can decide which experts a token gets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch
from torch import nn
from torch.nn import functional

from radixkv.model.native.weights import make_weight
from radixkv_cpu import Weight, is_packable

# Functions that convert a router's weight to float32 before its product.
_CONVERSIONS = frozenset({torch.Tensor.to, torch.Tensor.type, torch.Tensor.float})


class FunctionalWeight(torch.Tensor):
    """A weight ``[features, inputs]`` that is packed when `linear` is first called with it; otherwise an ordinary tensor.

    Attributes:
        product: the packed weight and bias.
        bias: the one that `linear` is called with; None: there is none.
        as_float32: the same weight in float32, once someone has converted it.
    """

    product: Weight | None
    bias: torch.Tensor | None
    as_float32: FunctionalWeight | None

    @classmethod
    def of(cls, weight: torch.Tensor, bias: torch.Tensor | None) -> Self:
        """The weight of a module that has this bias, or none."""
        made = weight.detach().as_subclass(cls)
        made.product, made.bias, made.as_float32 = None, bias, None
        return made

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        weight = args[1] if len(args) > 1 else given.get("weight")
        if function is functional.linear and isinstance(weight, cls):
            bias = args[2] if len(args) > 2 else given.get("bias")
            x = args[0] if args else given["input"]
            if x.dtype == weight.dtype and (bias is None or bias is weight.bias):
                return weight._product(bias).multiply(x)
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **given)
            if function in _CONVERSIONS and isinstance(args[0], cls) and result.dtype == torch.float32:
                return args[0]._in_float32(result)
            return result

    def _product(self, bias: torch.Tensor | None) -> Weight:
        with torch._C.DisableTorchFunctionSubclass():
            if self.product is None or (bias is None) != (self.bias is None):
                self.bias = bias
                self.product = make_weight([self.as_subclass(torch.Tensor)], [bias])
            return self.product

    def _in_float32(self, converted: torch.Tensor) -> FunctionalWeight:
        if self.dtype == torch.float32:
            return self
        if self.as_float32 is None:
            self.as_float32 = FunctionalWeight.of(converted, self.bias)
        return self.as_float32


def replace_functional_weights(model: nn.Module) -> None:
    """Replace the weights of modules that have one of their own and are neither linear layers nor embeddings."""
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is not None and not isinstance(module, nn.Linear | nn.Embedding) and is_packable(weight):
            replaced: Any = FunctionalWeight.of(weight, module._parameters.get("bias"))
            replaced._is_param = True  # by which torch recognizes the parameters among tensors of other classes
            module._parameters["weight"] = replaced
