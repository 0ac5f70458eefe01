"""Mixtures of experts (Shazeer et al. 2017): gated MLPs of which each row passes some; see ``src/experts.cpp``."""

from __future__ import annotations

import ctypes

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library
from radixkv_cpu.linear import PANEL, Weight


class _Experts(ctypes.Structure):
    """`Experts` of ``src/calls.h``."""

    _fields_ = (
        *pointers("x", "chosen", "weights", "out"),
        *sizes("rows", "per_row", "num_experts"),
        *pointers("gate_up", "down"),
    )


class Experts:
    """The sum of ``weight[i] * down[i](activation(gate[i](x)) * up[i](x))`` over the experts chosen for a row.

    Args:
        gate_up: a gated weight: the gates of all experts stacked, and likewise what they gate.
        down: those of all experts, stacked: ``[experts * width, inner]``; not gated.
        num_experts: how many experts the weights belong to.

    Raises:
        ValueError: the parts do not belong together, or an expert's features do not fill panels of `PANEL`.
    """

    def __init__(self, gate_up: Weight, down: Weight, num_experts: int) -> None:
        self.width, self.num_experts, self.dtype = gate_up.in_features, num_experts, gate_up.dtype
        inner = down.in_features
        given = [(weight.dtype, weight.in_features, weight.out_features, weight.is_gated) for weight in (gate_up, down)]
        expected = [
            (self.dtype, self.width, num_experts * inner, True),
            (self.dtype, inner, num_experts * self.width, False),
        ]
        if given != expected or inner % PANEL or self.width % PANEL:
            raise ValueError(
                f"weights: expected those of {num_experts} experts, an expert's features a multiple of {PANEL}, "
                f"got (type, inputs, outputs, whether gated) {given}"
            )
        # The library reads them at every call.
        self._weights = gate_up, down
        self._call = _Experts(num_experts=num_experts, gate_up=gate_up.address, down=down.address)
        self._is_bf16 = self.dtype == torch.bfloat16
        self._run = require_library().experts

    def run(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Compute rows.

        Args:
            x: ``[rows, width]``, of the weights' type.
            chosen: int64 ``[rows, experts of a row]``: numbers of experts; any other number adds nothing.
            weights: float32, of the same shape.

        Returns:
            ``[rows, width]``.

        Raises:
            ValueError: a tensor is of another shape or type, or not on the CPU.
        """
        if (
            chosen.dim() != 2
            or x.shape != (len(chosen), self.width)
            or weights.shape != chosen.shape
            or not (x.dtype == self.dtype and chosen.dtype == torch.int64 and weights.dtype == torch.float32)
            or not all(tensor.is_cpu and tensor.is_contiguous() for tensor in (x, chosen, weights))
        ):
            check_tensor("x", x, [None, self.width], [self.dtype])
            check_tensor("chosen", chosen, [len(x), None], [torch.int64])
            check_tensor("weights", weights, [*chosen.shape], [torch.float32])
        out = torch.empty_like(x)
        call = _Experts.from_buffer_copy(self._call)
        call.x, call.out = x.data_ptr(), out.data_ptr()
        call.chosen, call.weights = chosen.data_ptr(), weights.data_ptr()
        call.rows, call.per_row = chosen.shape
        self._run(ctypes.addressof(call), self._is_bf16)
        return out
