"""Shared by the two attention kernels, beside online softmax: a head's scales, storing results, and launch arguments."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from radixkv_kernels.online_softmax import (
    TileConfig,
    add_sink,
    attend_range,
    divide,
    log_sum_exp,
    reads_pairs,
    tile_config,
)
from radixkv_kernels.target import COMPILE_OPTIONS, compute_type


@triton.jit
def attend_head(
    query, row_position, first_position, last_position,
    key_cache, value_cache, table, key_scales, value_scales, head,
    start, end, window, scale, cap,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, QUANTISED: tl.constexpr, COMPUTE: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """`attend_range` over one key-value head of whole caches, whose scales it applies."""
    if QUANTISED:
        scale = scale * tl.load(key_scales + head)
    result, row_max, row_sum = attend_range(
        query, row_position, first_position, last_position,
        key_cache + head * key_head_stride, value_cache + head * value_head_stride, table,
        start, end, window, scale, cap,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        ROWS, KEYS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, WINDOW, SOFTCAP, COMPUTE, PAIRS,
    )  # fmt: skip
    if QUANTISED:
        result = result * tl.load(value_scales + head)
    return result, row_max, row_sum


@triton.jit
def store_result(
    result, row_max, row_sum, is_final, row, partial, query_head, wanted,
    output, partial_output, partial_lse, sinks,
    output_row_stride, output_head_stride, partial_row_stride, partial_head_stride, lse_row_stride,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Store a tile's rows as outputs, sinks included, if the result ``is_final``; otherwise as partial results.

    ``row`` and ``partial`` are one number for the whole tile or one for each of its rows; only ``wanted`` rows are stored.
    """
    dim = tl.arange(0, VALUE_TILE)
    mask = wanted[:, None] & (dim < VALUE_DIM)[None, :]
    if is_final:
        if SINKS:
            row_sum = add_sink(row_max, row_sum, tl.load(sinks + query_head, mask=wanted, other=0.0))
        offset = row.to(tl.int64) * output_row_stride + query_head.to(tl.int64) * output_head_stride
        final = divide(result, row_sum).to(output.dtype.element_ty)
        tl.store(output + offset[:, None] + dim[None, :], final, mask=mask)
    else:
        index = partial.to(tl.int64)
        offset = index * partial_row_stride + query_head.to(tl.int64) * partial_head_stride
        tl.store(partial_output + offset[:, None] + dim[None, :], divide(result, row_sum), mask=mask)
        tl.store(partial_lse + index * lse_row_stride + query_head, log_sum_exp(row_max, row_sum), mask=wanted)


def attention_strides(
    query: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
) -> tuple[int, ...]:
    """All strides but each tensor's last, in the kernels' order."""
    return (
        *query.stride()[:2], *output.stride()[:2], *partial_output.stride()[:2], partial_lse.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
    )  # fmt: skip


def attention_constants(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tile_rows: int,
    *,
    softcap: float | None,
    window: int | None,
    sinks: torch.Tensor | None,
    config: TileConfig | None,
) -> dict[str, Any]:
    """The kernels' compile-time constants; arguments as in `attend_items`."""
    block_size, num_kv_heads, key_dim = key_cache.shape[1:]
    value_dim = value_cache.shape[3]
    key_tile, value_tile = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    if config is None:
        config = tile_config(tile_rows, key_tile, value_tile, query.dtype, key_cache.dtype)
    return {
        "GROUP": query.shape[1] // num_kv_heads, "ROWS": tile_rows, "BLOCK_SIZE": block_size,
        "KEY_DIM": key_dim, "VALUE_DIM": value_dim, "KEY_TILE": max(16, key_tile), "VALUE_TILE": max(16, value_tile),
        "WINDOW": window is not None, "SOFTCAP": softcap is not None, "SINKS": sinks is not None,
        "QUANTISED": key_cache.dtype == torch.float8_e4m3fn, "COMPUTE": compute_type(query.dtype, key_cache.dtype),
        "PAIRS": reads_pairs(tile_rows, value_cache, value_tile),
        "KEYS": config.keys, "num_warps": config.warps, "num_stages": config.stages, **COMPILE_OPTIONS,
    }  # fmt: skip
