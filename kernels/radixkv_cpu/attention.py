"""Attention over paged keys and values, read where they lie."""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv_cpu.library import require_library

_POINTERS = (
    "query", "keys", "values", "out", "sinks", "block_ids", "positions",
    "row_start", "row_stop", "table", "key_start", "key_stop",
)  # fmt: skip
_SIZES = (
    "num_ranges", "num_rows", "blocks_per_table", "block_size",
    "num_query_heads", "num_kv_heads", "key_dim", "value_dim",
    "query_row_stride", "query_head_stride", "out_row_stride", "window",
)  # fmt: skip


class _Attention(ctypes.Structure):
    """`Attention` of ``src/attention.cpp``."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int64) for name in _SIZES),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class PagedAttention:
    """Attention over one batch, for all layers. Every row's keys must be covered by ranges exactly once.

    Args:
        row_ranges: int64 ``[2, ranges]``: the first of neighbouring query rows that read a range, and one past the last.
        tables: int64 ``[ranges]``: the row of ``block_ids`` through which the keys are found.
        key_ranges: int64 ``[2, ranges]``: the first key's position, and one past the last.
        block_ids: int32 ``[tables, blocks]``.
        positions: int64 ``[rows]``: a row sees keys up to its own position.
        block_size: tokens per block.
    """

    def __init__(
        self,
        row_ranges: NDArray[np.int64],
        tables: NDArray[np.int64],
        key_ranges: NDArray[np.int64],
        block_ids: NDArray[np.int32],
        positions: NDArray[np.int64],
        block_size: int,
    ) -> None:
        # Kept: the library reads them at every call.
        self._columns = tuple(np.ascontiguousarray(column) for column in (*row_ranges, tables, *key_ranges))
        self._positions = np.ascontiguousarray(positions)
        self._block_ids = np.ascontiguousarray(block_ids)
        pointers = (column.ctypes.data for column in self._columns)
        self._call = _Attention(
            block_ids=self._block_ids.ctypes.data,
            positions=self._positions.ctypes.data,
            **dict(zip(_POINTERS[-5:], pointers, strict=True)),
            num_ranges=len(tables),
            num_rows=len(positions),
            blocks_per_table=block_ids.shape[1],
            block_size=block_size,
        )
        self._address = ctypes.addressof(self._call)
        self._run = require_library().attention

    def attend(
        self,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend one layer.

        Args:
            query: ``[rows, query heads, key dim]``, each head contiguous, of the cache's type.
            keys: ``[blocks, block size, kv heads, key dim]``.
            values: ``[blocks, block size, kv heads, value dim]``.
            scale: scores are multiplied by it.
            softcap: scores become ``softcap * tanh(score / softcap)``.
            window: a row sees so many keys up to its own.
            sinks: float32 ``[query heads]``: scores that take part in the softmax without a value.

        Returns:
            ``[rows, query heads, value dim]``.
        """
        rows, num_query_heads, key_dim = query.shape
        num_kv_heads, value_dim = values.shape[2:]
        out = query.new_empty(rows, num_query_heads, value_dim)
        call = self._call
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.num_query_heads, call.num_kv_heads = num_query_heads, num_kv_heads
        call.key_dim, call.value_dim = key_dim, value_dim
        call.query_row_stride, call.query_head_stride = query.stride(0), query.stride(1)
        call.out_row_stride = num_query_heads * value_dim
        call.window, call.scale, call.softcap = window or 0, scale, softcap or 0.0
        self._run(self._address, query.dtype == torch.bfloat16)
        return out
