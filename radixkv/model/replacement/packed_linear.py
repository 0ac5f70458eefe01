"""Linear layers whose weights are packed once for the CPU's matrix kernels, and fused where they have the same input.

torch runs a float32 `nn.Linear` in MKL, which packs the weight again at every call and on AMD processors does not use the
widest instructions. oneDNN with a weight packed in advance gives the same product up to rounding, and sooner
(docs/benchmarks/cpu.md has the figures).

With few rows a product is so short that its launch overhead counts. Where several layers read the same input, as query, key
and value projections do, their weights are packed as one and the first of them to be called computes all outputs. The much
wider layers of an MLP are not fused: that would cost long prompts more than it saves, for the next operation must read
halves of wide rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from radixkv.model.replacement.replace_modules import is_plain_linear, replace_modules
from radixkv.model.replacement.shared_input import FusedProduct, concatenated_bias, groups_by_input

# Linears are fused up to this many output features per input feature.
_MAX_FUSED_WIDENING = 3


class PackedLinear(nn.Module):
    """``x @ weight.T + bias`` like the `nn.Linear` that it is made from. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear, product: FusedProduct, index: int) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self._product = product
        self._index = index
        # Some models read dtype or device of their layers' weights; an empty tensor has both without memory.
        self.weight = torch.empty(0, dtype=linear.weight.dtype, device=linear.weight.device)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return self._product.output(input, self._index)


class _PackedProduct(FusedProduct):
    """The product with several linears' weights, packed as one."""

    def __init__(self, linears: Sequence[nn.Linear]) -> None:
        super().__init__([linear.out_features for linear in linears])
        self._packed = torch.ops.mkldnn._reorder_linear_weight(
            torch.cat([linear.weight.detach() for linear in linears])
        )
        self._bias = concatenated_bias(linears)
        self._width = sum(linear.out_features for linear in linears)

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            compiled: torch.Tensor = packed_linear(x, self._packed, self._bias, self._width)
            return compiled
        result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")
        return result


@torch.library.custom_op("radixkv::packed_linear", mutates_args=())
def packed_linear(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    """The product for compiled layers: torch's compiler takes packed weights only as constants."""
    result: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return result


@packed_linear.register_fake
def _(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, out_features: int) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def pack_linears(model: nn.Module, run_once: Callable[[], object]) -> int:
    """Replace every `nn.Linear` by a packed one, where torch and the processor can; returns how many.

    Args:
        model: on the CPU.
        run_once: runs the model on any input, to record which layers get the same tensor. Only speed depends on it: a layer
            that is called with another input later computes its product then.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    dtypes = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        dtypes.add(torch.bfloat16)
    linears = [
        module
        for module in model.modules()
        if is_plain_linear(module) and module.weight.dtype in dtypes and module.weight.numel()
    ]
    if not linears:
        return 0
    with torch.inference_mode():
        packed: dict[nn.Module, PackedLinear] = {}
        for group in groups_by_input(model, linears, run_once, _MAX_FUSED_WIDENING):
            product = _PackedProduct(group)
            packed |= {linear: PackedLinear(linear, product, index) for index, linear in enumerate(group)}
        replace_modules(model, packed)
    return len(packed)
