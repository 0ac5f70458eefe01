"""Norms, rotary positions, and new keys and values on their way into the cache."""

from __future__ import annotations

import ctypes

import torch

from radixkv_cpu.library import require_library


class _Norm(ctypes.Structure):
    """`Norm` of ``src/elementwise.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "weight", "out")),
        *((name, ctypes.c_int64) for name in ("rows", "groups", "dim", "x_stride", "out_stride")),
        ("epsilon", ctypes.c_float),
    )


class _Rope(ctypes.Structure):
    """`Rope` of ``src/elementwise.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("query", "key", "cos", "sin")),
        *(
            (name, ctypes.c_int64)
            for name in ("rows", "num_query_heads", "num_kv_heads", "dim", "rotary_dim", "row_stride")
        ),
    )


class _Write(ctypes.Structure):
    """`Write` of ``src/elementwise.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("key", "value", "keys", "values", "slots")),
        *((name, ctypes.c_int64) for name in ("rows", "num_kv_heads", "key_bytes", "value_bytes")),
        *(
            (name, ctypes.c_int64)
            for name in ("key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride")
        ),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension.

    Args:
        x: ``[..., dim]``; or ``[rows, groups, dim]`` in which only the rows are not contiguous, with ``out`` being ``x``.
        weight: float32 ``[dim]``.
        out: where the result goes, None: into a new tensor.
    """
    dim = x.shape[-1]
    if out is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, groups, stride = x.numel() // dim, 1, dim
    else:
        rows, groups, stride = x.shape[0], x.shape[1], x.stride(0)
    call = _Norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, groups, dim, stride, stride, epsilon)
    require_library().rms_norm(ctypes.addressof(call), x.dtype == torch.bfloat16)
    return out


def rope_(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Turn queries and keys in place by their positions; of each head the first ``rotary dim`` dimensions, half by half.

    Args:
        query: ``[rows, query heads, dim]``, whose rows lie as far apart as those of ``key``.
        key: ``[rows, kv heads, dim]``.
        cos: ``[rows, rotary dim]``.
        sin: likewise.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    rows, num_query_heads, dim = query.shape
    call = _Rope(
        query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        rows, num_query_heads, key.shape[1], dim, cos.shape[-1], query.stride(0),
    )  # fmt: skip
    require_library().rope(ctypes.addressof(call), query.dtype == torch.bfloat16)


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys and values in the cache.

    Args:
        key: ``[rows, kv heads, key dim]``, each head contiguous, of the cache's type.
        value: ``[rows, kv heads, value dim]``, likewise.
        keys: ``[slots, kv heads, key dim]``, or with blocks in place of slots.
        values: likewise.
        slots: int64 ``[rows]``.
    """
    rows, num_kv_heads, key_dim = key.shape
    size = key.element_size()
    call = _Write(
        key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr(), slots.data_ptr(),
        rows, num_kv_heads, key_dim * size, value.shape[2] * size,
        key.stride(0) * size, key.stride(1) * size, value.stride(0) * size, value.stride(1) * size,
    )  # fmt: skip
    require_library().write(ctypes.addressof(call))
