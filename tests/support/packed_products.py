"""Products with packed weights: told which rows continue answers, as decoder layers tell them; and what they must be."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from support.cpu_variants import assert_close

from radixkv_cpu import Weight
from radixkv_cpu.library import require_library
from radixkv_cpu.linear import _Linear


def product(
    weight: Weight, x: torch.Tensor, decoding: Sequence[int], residual: torch.Tensor | None = None
) -> torch.Tensor:
    """`Weight.multiply`, told which rows continue answers; a residual becomes the result in place."""
    rows = torch.tensor(decoding, dtype=torch.int64)
    x = x.contiguous()
    out = x.new_empty(len(x), weight.out_features) if residual is None else residual.clone()
    call = _Linear.from_buffer_copy(_Linear.from_address(weight.address))
    call.x, call.out, call.rows = x.data_ptr(), out.data_ptr(), len(x)
    call.residual = None if residual is None else out.data_ptr()
    call.decoding, call.num_decoding = rows.data_ptr(), len(rows)
    require_library().linear(ctypes.addressof(call), x.dtype == torch.bfloat16)
    return out


def assert_is_product(
    given: torch.Tensor,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None],
    residual: torch.Tensor | None = None,
) -> None:
    """``x @ weight.T + bias + residual`` in float64, the weights one below the other, but for rounding."""
    weight = torch.cat([*weights]).double()
    expected, magnitude = x.double() @ weight.T, x.double().abs() @ weight.abs().T
    bias = torch.cat([w.new_zeros(len(w)) if b is None else b for w, b in zip(weights, biases, strict=True)])
    for part in (bias, *([] if residual is None else [residual])):
        expected, magnitude = expected + part.double(), magnitude + part.double().abs()
    assert_close(given, expected, magnitude)
