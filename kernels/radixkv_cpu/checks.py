"""Arguments are checked before native code gets a pointer: a wrong tensor is a ValueError, never an illegal access.

Native functions are called several times per layer, so each first tests in one expression whether its tensors are as usual.
Only if they are not does `check_tensor` look at them one by one, to find out what is wrong, if anything is.

The contents of tensors are not checked: the caller is responsible for slots and block ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from ctypes import c_float

import torch

NATIVE_DTYPES = (torch.float32, torch.bfloat16)
"""The types that the native code computes with."""


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    shape: Sequence[int | None],
    dtypes: Sequence[torch.dtype],
    contiguous_dims: int | None = None,
) -> None:
    """Refuse a tensor of another shape (None: any size) or type, that is not on the CPU, or not contiguous.

    Args:
        contiguous_dims: how many of the last dimensions must be contiguous; None: all.

    Raises:
        ValueError: names the tensor, what was expected and what was given.
    """
    given = list(tensor.shape)
    if len(given) != len(shape) or any(size not in (None, own) for size, own in zip(shape, given, strict=True)):
        expected = ", ".join("any" if size is None else str(size) for size in shape)
        raise ValueError(f"{name}: expected shape [{expected}], got {given}")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(f"{name}: expected {names}, got {str(tensor.dtype).removeprefix('torch.')}")
    if not tensor.is_cpu:
        raise ValueError(f"{name}: expected on cpu, got {tensor.device}")
    count = len(given) if contiguous_dims is None else contiguous_dims
    expected_stride = 1
    for size, stride in list(zip(given, tensor.stride(), strict=True))[::-1][:count]:
        if size > 1 and stride != expected_stride and tensor.numel():
            what = "a contiguous tensor" if count == len(given) else f"the last {count} dimensions contiguous"
            raise ValueError(f"{name}: expected {what}, got shape {given} with strides {list(tensor.stride())}")
        expected_stride *= size


def check_scores(window: int | None, softcap: float | None) -> None:
    """Refuse a sliding window or a softcap that attention cannot apply.

    Raises:
        ValueError: names what was expected and what was given.
    """
    if (window is not None and window < 1) or (softcap is not None and not 0 < c_float(softcap).value < math.inf):
        raise ValueError(
            f"window and softcap: expected at least 1 and a finite float32 above 0, or None, got {window} and {softcap}"
        )
