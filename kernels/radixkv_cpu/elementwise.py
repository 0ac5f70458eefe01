"""Norms, rotary positions, and new keys and values on their way into the cache."""

from __future__ import annotations

import ctypes

import torch

from radixkv_cpu.checks import NATIVE_DTYPES, check_tensor
from radixkv_cpu.fields import floats, pointers, sizes
from radixkv_cpu.library import require_library


class _Norm(ctypes.Structure):
    """`Norm` of ``src/calls.h``."""

    _fields_ = (
        *pointers("x", "weight", "out"),
        *sizes("rows", "groups", "dim", "stride"),
        *floats("epsilon"),
    )


class _Rope(ctypes.Structure):
    """`Rope` of ``src/calls.h``."""

    _fields_ = (
        *pointers("query", "key", "cos", "sin"),
        *sizes("rows", "num_query_heads", "num_kv_heads", "dim", "rotary_dim", "row_stride"),
    )


class _Write(ctypes.Structure):
    """`Write` of ``src/calls.h``."""

    _fields_ = (
        *pointers("key", "value", "keys", "values", "slots"),
        *sizes("rows", "num_kv_heads", "key_bytes", "value_bytes"),
        *sizes("key_row_stride", "key_head_stride", "value_row_stride", "value_head_stride"),
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float, out: torch.Tensor | None = None) -> torch.Tensor:
    """``x / sqrt(mean(x^2) + epsilon) * weight`` over the last dimension.

    Args:
        x: ``[..., dim]``; with ``out``, ``[rows, groups, dim]`` whose rows are contiguous, may be apart, and do not overlap.
        weight: float32 ``[dim]``.
        out: ``x`` itself, which then becomes the result; None: the result is a new tensor.

    Raises:
        ValueError: a tensor is not as above; nothing is written.
    """
    shape = x.shape
    dim = shape[-1] if shape else 0
    if (
        x.dtype not in NATIVE_DTYPES
        or not (x.is_cpu and weight.is_cpu and weight.is_contiguous())
        or not shape
        or weight.shape != (dim,)
        or weight.dtype != torch.float32
    ):
        check_tensor("x", x, [*shape[:-1], None], NATIVE_DTYPES, 0)
        check_tensor("weight", weight, [dim], [torch.float32])
    if out is None:
        x = x.contiguous()
        out = torch.empty_like(x)
        rows, groups, stride = x.numel() // max(dim, 1), 1, dim
    else:
        if out is not x:
            raise ValueError("out: expected x itself or None, got another tensor")
        strides = x.stride()
        if len(shape) != 3 or strides[1] != dim or strides[2] != 1:
            check_tensor("x", x, [None, None, None], [x.dtype], 2)
        if shape[0] > 1 and strides[0] < shape[1] * dim:
            raise ValueError(f"x: expected rows at least {shape[1] * dim} apart, got {strides[0]}")
        rows, groups, stride = shape[0], shape[1], strides[0]
    call = _Norm(x.data_ptr(), weight.data_ptr(), out.data_ptr(), rows, groups, dim, stride, epsilon)
    require_library().rms_norm(ctypes.addressof(call), x.dtype == torch.bfloat16)
    return out


def rope_(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    """Rotate the first ``rotary dim`` dimensions of queries and keys in place, the halves of these as pairs.

    Args:
        query: ``[rows, query heads, dim]``, whose rows lie as far apart as those of ``key`` and do not overlap.
        key: ``[rows, kv heads, dim]``.
        cos: ``[rows, rotary dim]``, of the query's type.
        sin: likewise.

    Raises:
        ValueError: a tensor is not as above; nothing is written.
    """
    cos, sin = cos.contiguous(), sin.contiguous()
    shape, stride, dtype = query.shape, query.stride(), query.dtype
    key_shape, cos_shape = key.shape, cos.shape
    if (
        dtype not in NATIVE_DTYPES
        or not (dtype == key.dtype == cos.dtype == sin.dtype)
        or not (query.is_cpu and key.is_cpu and cos.is_cpu and sin.is_cpu)
        or not (len(shape) == len(key_shape) == 3)
        or stride != key.stride()
        or not (stride[2] == 1 and stride[1] == shape[2])
        or (shape[0] > 1 and stride[0] < max(shape[1], key_shape[1]) * shape[2])
        or len(cos_shape) != 2
        or cos_shape != sin.shape
        or not (shape[0] == key_shape[0] == cos_shape[0])
        or shape[2] != key_shape[2]
        or cos_shape[-1] > shape[2]
        or cos_shape[-1] % 2
    ):
        _check_rope(query, key, cos, sin)
    call = _Rope(
        query.data_ptr(), key.data_ptr(), cos.data_ptr(), sin.data_ptr(),
        shape[0], shape[1], key_shape[1], shape[2], cos_shape[1], stride[0],
    )  # fmt: skip
    require_library().rope(ctypes.addressof(call), dtype == torch.bfloat16)


def _check_rope(query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_tensor("query", query, [None, None, None], NATIVE_DTYPES, 2)
    rows, num_query_heads, dim = query.shape
    check_tensor("key", key, [rows, None, dim], [query.dtype], 2)
    if rows > 1 and query.stride(0) != key.stride(0):
        raise ValueError(f"key: expected rows {query.stride(0)} apart as the query's are, got {key.stride(0)}")
    for name, heads in (("query", num_query_heads), ("key", key.shape[1])):
        if rows > 1 and query.stride(0) < heads * dim:
            raise ValueError(f"{name}: expected rows at least {heads * dim} apart, got {query.stride(0)}")
    check_tensor("cos", cos, [rows, None], [query.dtype])
    check_tensor("sin", sin, [rows, cos.shape[1]], [query.dtype])
    if cos.shape[1] > dim or cos.shape[1] % 2:
        raise ValueError(f"cos: expected an even number of dimensions up to {dim}, got {list(cos.shape)}")


def write_cache(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    """Store new keys and values in the cache.

    Args:
        key: ``[rows, kv heads, key dim]``, each head contiguous, of the cache's type.
        value: ``[rows, kv heads, value dim]``, likewise.
        keys: ``[slots, kv heads, key dim]``, or ``[blocks, block size, kv heads, key dim]``.
        values: likewise.
        slots: int64 ``[rows]``, no two alike. It is not checked that the cache has them.

    Raises:
        ValueError: a tensor is not as above; nothing is written.
    """
    shape, value_shape, stride, value_stride = key.shape, value.shape, key.stride(), value.stride()
    keys_shape, values_shape, dtype = keys.shape, values.shape, key.dtype
    if (
        not (len(shape) == len(value_shape) == 3 and len(keys_shape) == len(values_shape) == 4)
        or not (dtype == value.dtype == keys.dtype == values.dtype and slots.dtype == torch.int64)
        or not (key.is_cpu and value.is_cpu and keys.is_cpu and values.is_cpu and slots.is_cpu)
        or not (keys.is_contiguous() and values.is_contiguous() and slots.is_contiguous())
        or not (stride[2] == value_stride[2] == 1)
        or not (shape[0] == value_shape[0] and slots.shape == (shape[0],))
        or not (shape[1] == value_shape[1] == keys_shape[2] == values_shape[2])
        or not (shape[2] == keys_shape[3] and value_shape[2] == values_shape[3])
        or not (keys_shape[0] == values_shape[0] and keys_shape[1] == values_shape[1])
    ):
        _check_write(key, value, keys, values, slots)
    rows, num_kv_heads, key_dim = shape
    size = key.element_size()
    call = _Write(
        key.data_ptr(), value.data_ptr(), keys.data_ptr(), values.data_ptr(), slots.data_ptr(),
        rows, num_kv_heads, key_dim * size, value_shape[2] * size,
        stride[0] * size, stride[1] * size, value_stride[0] * size, value_stride[1] * size,
    )  # fmt: skip
    require_library().write(ctypes.addressof(call), dtype == torch.bfloat16)


def _check_write(
    key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, slots: torch.Tensor
) -> None:
    check_tensor("key", key, [None, None, None], [key.dtype], 1)
    rows, num_kv_heads, key_dim = key.shape
    check_tensor("value", value, [rows, num_kv_heads, None], [key.dtype], 1)
    check_tensor("keys", keys, [*keys.shape[:-2], num_kv_heads, key_dim], [key.dtype])
    check_tensor("values", values, [*keys.shape[:-2], num_kv_heads, value.shape[2]], [key.dtype])
    check_tensor("slots", slots, [rows], [torch.int64])
