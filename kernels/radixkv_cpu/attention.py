"""Attention over paged keys and values, read where they lie."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv_cpu.checks import NATIVE_DTYPES, check_scores, check_tensor
from radixkv_cpu.fields import floats, pointers, sizes
from radixkv_cpu.library import require_library

# Of every range of keys.
_COLUMNS = ("row_start", "row_stop", "table", "key_start", "key_stop", "kinds")

_INT8, _INT32, _INT64 = map(np.dtype, (np.int8, np.int32, np.int64))
_UNSIGNED: Mapping[np.dtype[Any], np.dtype[Any]] = MappingProxyType(
    {_INT8: np.dtype(np.uint8), _INT64: np.dtype(np.uint64)}
)


MAX_DECODING_ROWS = 32
"""Most rows of a decoding range, `kMaxDecodingRows` of ``src/attention_tasks.h``."""


class RowKind(IntEnum):
    """Whose rows read a range of keys.

    A row of a single sequence gets the same result, to the last bit, whatever rows are beside it, provided that keys and
    values are finite; otherwise a key that only another row sees may make it NaN.

    Attributes:
        SHARED: rows of several sequences.
        PROMPT: rows of one sequence's prompt, any number of them.
        DECODING: one sequence's last known token and the drafts after it, at most `MAX_DECODING_ROWS` rows: longer drafts
            take several ranges.
    """

    SHARED = 0
    PROMPT = 1
    DECODING = 2


class _Attention(ctypes.Structure):
    """`Attention` of ``src/calls.h``."""

    _fields_ = (
        *pointers("query", "keys", "values", "out", "sinks", "block_ids", "positions", *_COLUMNS),
        *sizes("num_ranges", "num_rows", "blocks_per_table", "block_size"),
        *sizes("num_query_heads", "num_kv_heads", "key_dim", "value_dim"),
        *sizes("query_row_stride", "query_head_stride", "out_row_stride", "window"),
        *floats("scale", "softcap"),
    )


class PagedAttention:
    """Attention over one batch, for all layers. Every row's keys must be covered by ranges exactly once.

    Args:
        row_ranges: int64 ``[2, ranges]``: the first of neighbouring query rows that read a range, and one past the last.
        tables: int64 ``[ranges]``: the row of ``block_ids`` through which the keys are found.
        key_ranges: int64 ``[2, ranges]``: the first key's position, and one past the last.
        block_ids: int32 ``[tables, blocks]``, not to be changed while this object is used. It is not checked that the cache
            has these blocks.
        positions: int64 ``[rows]``: a row sees keys up to its own position.
        block_size: tokens per block.
        kinds: int8 ``[ranges]``: each range's `RowKind`.

    Raises:
        ValueError: an array is of another type or shape, or a range reaches beyond rows, tables or a table's blocks.

    Attributes:
        num_rows: query rows.
        block_size: tokens per block.
        address: of an `Attention` of ``src/calls.h`` with the arguments common to all layers; valid while this object is.
    """

    def __init__(
        self,
        row_ranges: NDArray[np.int64],
        tables: NDArray[np.int64],
        key_ranges: NDArray[np.int64],
        block_ids: NDArray[np.int32],
        positions: NDArray[np.int64],
        block_size: int,
        kinds: NDArray[np.int8],
    ) -> None:
        _check_ranges(row_ranges, tables, key_ranges, block_ids, positions, block_size, kinds)
        # Kept: the library reads them at every call. What was checked is copied, so that it stays as it was.
        self._columns = tuple(column.copy() for column in (*row_ranges, tables, *key_ranges, kinds))
        self._positions = positions.copy()
        self._block_ids = np.ascontiguousarray(block_ids)
        addresses = (column.ctypes.data for column in self._columns)
        # The arguments common to all layers, which each call copies.
        self._call = _Attention(
            block_ids=self._block_ids.ctypes.data,
            positions=self._positions.ctypes.data,
            **dict(zip(_COLUMNS, addresses, strict=True)),
            num_ranges=len(tables),
            num_rows=len(positions),
            blocks_per_table=block_ids.shape[1],
            block_size=block_size,
        )
        self.num_rows, self.block_size = len(positions), block_size
        self.address = ctypes.addressof(self._call)
        self._run = require_library().attention

    def of_rows(self, rows: NDArray[np.int64]) -> PagedAttention:
        """Attention of some of the rows, with the same results; over a shared range, up to rounding.

        Args:
            rows: int64, ascending.
        """
        row_start, row_stop, tables, key_start, key_stop, kinds = self._columns
        row_ranges = rows.searchsorted((row_start, row_stop))
        (read,) = (row_ranges[0] < row_ranges[1]).nonzero()
        key_ranges = np.stack((key_start[read], key_stop[read]))
        return PagedAttention(
            row_ranges[:, read], tables[read], key_ranges, self._block_ids, self._positions[rows], self.block_size,
            kinds[read],
        )  # fmt: skip

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
            window: how many keys a row sees, its own included; None: all.
            sinks: float32 ``[query heads]``: a score per head that takes part in the softmax without a value.

        Returns:
            ``[rows, query heads, value dim]``.

        Raises:
            ValueError: a tensor or number is not as above.
        """
        shape, stride, key_shape, value_shape = query.shape, query.stride(), keys.shape, values.shape
        dtype = query.dtype
        if (
            dtype not in NATIVE_DTYPES
            or not (dtype == keys.dtype == values.dtype)
            or not (query.is_cpu and keys.is_cpu and values.is_cpu)
            or not (keys.is_contiguous() and values.is_contiguous())
            or not (len(shape) == 3 and len(key_shape) == len(value_shape) == 4)
            or stride[2] != 1
            or shape[0] != self.num_rows
            or key_shape[1] != self.block_size
            or not (
                key_shape[0] == value_shape[0] and key_shape[1] == value_shape[1] and key_shape[2] == value_shape[2]
            )
            or shape[2] != key_shape[3]
            or not shape[2]
            or not key_shape[2]
            or not shape[1]
            or shape[1] % key_shape[2]
        ):
            self._check(query, keys, values)
        check_scores(window, softcap)
        rows, num_query_heads, key_dim = shape
        num_kv_heads, value_dim = value_shape[2], value_shape[3]
        if sinks is not None and (
            sinks.shape != (num_query_heads,)
            or sinks.dtype != torch.float32
            or not (sinks.is_cpu and sinks.is_contiguous())
        ):
            check_tensor("sinks", sinks, [num_query_heads], [torch.float32])
        out = query.new_empty(rows, num_query_heads, value_dim)
        call = _Attention.from_buffer_copy(self._call)
        call.query, call.out = query.data_ptr(), out.data_ptr()
        call.keys, call.values = keys.data_ptr(), values.data_ptr()
        call.sinks = None if sinks is None else sinks.data_ptr()
        call.num_query_heads, call.num_kv_heads = num_query_heads, num_kv_heads
        call.key_dim, call.value_dim = key_dim, value_dim
        call.query_row_stride, call.query_head_stride = stride[0], stride[1]
        call.out_row_stride = num_query_heads * value_dim
        call.window, call.scale, call.softcap = window or 0, scale, softcap or 0.0
        self._run(ctypes.addressof(call), dtype == torch.bfloat16)
        return out

    def _check(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        check_tensor("keys", keys, [None, self.block_size, None, None], NATIVE_DTYPES)
        num_blocks, _, num_kv_heads, key_dim = keys.shape
        if not key_dim:
            raise ValueError(f"keys: expected at least one dimension of a head, got shape {list(keys.shape)}")
        check_tensor("values", values, [num_blocks, self.block_size, num_kv_heads, None], [keys.dtype])
        check_tensor("query", query, [self.num_rows, None, key_dim], [keys.dtype], 1)
        if not num_kv_heads or not query.shape[1] or query.shape[1] % num_kv_heads:
            raise ValueError(f"query: expected a multiple of the cache's {num_kv_heads} heads, got {list(query.shape)}")


def _check_ranges(
    row_ranges: NDArray[np.int64],
    tables: NDArray[np.int64],
    key_ranges: NDArray[np.int64],
    block_ids: NDArray[np.int32],
    positions: NDArray[np.int64],
    block_size: int,
    kinds: NDArray[np.int8],
) -> None:
    count, rows = len(tables), len(positions)
    for name, array, dtype, expected in (
        ("row_ranges", row_ranges, _INT64, (2, count)),
        ("tables", tables, _INT64, (count,)),
        ("key_ranges", key_ranges, _INT64, (2, count)),
        ("positions", positions, _INT64, (rows,)),
        ("kinds", kinds, _INT8, (count,)),
        ("block_ids", block_ids, _INT32, (*block_ids.shape, 1, 1)[:2]),
    ):
        if array.dtype != dtype or array.shape != expected:
            raise ValueError(f"{name}: expected {dtype} {list(expected)}, got {array.dtype} {list(array.shape)}")
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1, got {block_size}")
    if not count:
        return
    num_tables, num_blocks = block_ids.shape
    bounds: tuple[tuple[str, NDArray[Any], int], ...] = (
        ("row_ranges", row_ranges, rows + 1),
        ("tables", tables, num_tables),
        ("key_ranges", key_ranges, num_blocks * block_size + 1),
        ("kinds", kinds, len(RowKind)),
    )
    for name, array, past in bounds:
        # As unsigned numbers, negative ones are too large as well.
        if np.maximum.reduce(array.view(_UNSIGNED[array.dtype]), axis=None) >= past:
            raise ValueError(f"{name}: expected 0 to {past - 1}, got {array.min()} to {array.max()}")
