"""Decoding where nothing is shared: one new token a sequence, its keys split into equal parts.

No items are needed: program (head, part, sequence) finds its keys from the sequence's position alone, so that a batch that
only grows changes nothing but the positions. Each part is as long as the others, a whole number of tiles (Flash-Decoding,
Dao et al. 2023).

Bytes moved: ``keys * kv heads * (key dim + value dim) * bytes an element`` over all sequences; 256 sequences of 4,096 tokens
with 8 heads of 128 in bfloat16 read 4.3 GB, whose floor on a GPU of B bytes/s is 4.3 GB / B (1.0 ms at 4.3 TB/s). Beside
them ``rows * query heads * (key dim + value dim)`` elements of queries and outputs are little; several parts write so many
float32 results a row in place of its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import check_at_most, check_attention, check_tensor
from radixkv_kernels.item_attention import TILE_ROWS
from radixkv_kernels.merge import merge_splits
from radixkv_kernels.online_softmax import (
    TileConfig,
    add_sink,
    attend_range,
    divide,
    kernel_window,
    load_query,
    log_sum_exp,
    score_factors,
    tile_config,
)
from radixkv_kernels.target import compute_type

__all__ = ["attend_split", "merge_splits"]


@triton.jit(do_not_specialize=["num_splits"])
def _attend_split(
    query, key_cache, value_cache, tables, row_tables, positions,
    output, partial_output, partial_lse, sinks, key_scales, value_scales,
    scale, cap, window, num_splits, table_stride,
    query_row_stride, query_head_stride, output_row_stride, output_head_stride,
    partial_row_stride, partial_head_stride, lse_row_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QUANTISED: tl.constexpr, COMPUTE: tl.constexpr,
):  # fmt: skip
    """One program: one part of one sequence's keys for one key-value head; grid (kv heads, parts, rows).

    Shapes and types as in `attend_split`. Strides in elements; the last of each tensor is 1.
    """
    head = tl.program_id(0)
    part = tl.program_id(1)
    row = tl.program_id(2)
    position = tl.load(positions + row)
    start = 0
    if WINDOW:
        start = tl.maximum(position - window + 1, 0)
    length = tl.cdiv(tl.cdiv(position + 1 - start, num_splits), KEYS) * KEYS
    start += part * length
    end = tl.minimum(start + length, position + 1)

    tile_row = tl.arange(0, ROWS)
    wanted = tile_row < GROUP
    query_head = head * GROUP + tile_row
    row_position = tl.full([ROWS], 0, tl.int32) + position
    tile = load_query(
        query, tl.full([ROWS], 0, tl.int32) + row, query_head, wanted, query_row_stride, query_head_stride,
        KEY_DIM, KEY_TILE, COMPUTE,
    )  # fmt: skip
    if QUANTISED:
        scale = scale * tl.load(key_scales + head)
    # The part begins inside the window already, so that no key needs to be masked for it.
    result, row_max, row_sum = attend_range(
        tile, row_position, position, position,
        key_cache + head * key_head_stride, value_cache + head * value_head_stride,
        tables + tl.load(row_tables + row).to(tl.int64) * table_stride,
        start, end, window, scale, cap,
        key_block_stride, key_slot_stride, value_block_stride, value_slot_stride,
        ROWS, KEYS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, False, SOFTCAP, COMPUTE,
    )  # fmt: skip
    if QUANTISED:
        result = result * tl.load(value_scales + head)

    dim = tl.arange(0, VALUE_TILE)
    mask = wanted[:, None] & (dim < VALUE_DIM)[None, :]
    if num_splits == 1:
        if SINKS:
            row_sum = add_sink(row_max, row_sum, tl.load(sinks + query_head, mask=wanted, other=0.0))
        offset = row.to(tl.int64) * output_row_stride + query_head.to(tl.int64) * output_head_stride
        final = divide(result, row_sum).to(output.dtype.element_ty)
        tl.store(output + offset[:, None] + dim[None, :], final, mask=mask)
    else:
        partial = row.to(tl.int64) * num_splits + part
        offset = partial * partial_row_stride + query_head.to(tl.int64) * partial_head_stride
        tl.store(partial_output + offset[:, None] + dim[None, :], divide(result, row_sum), mask=mask)
        tl.store(partial_lse + partial * lse_row_stride + query_head, log_sum_exp(row_max, row_sum), mask=wanted)


def attend_split(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    row_tables: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    num_splits: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> None:
    """Attend one row of each sequence to all its keys, in ``num_splits`` parts that `merge_splits` puts together.

    Strides as for `attend_items`.

    Args:
        query: ``[rows, query heads, key dim]``, float32, float16 or bfloat16; at most 65,535 rows.
        key_cache: as in `attend_items`.
        value_cache: as in `attend_items`.
        tables: int32 ``[tables, blocks]``: block ids by position // block_size.
        row_tables: int32 ``[rows]``: which table each row reads through.
        positions: int32 ``[rows]``: each row's position, itself included in what it sees; negative: padding, sees nothing.
        output: ``[rows, query heads, value dim]``, of the query's type, written when there is one part.
        partial_output: float32 ``[rows * num_splits or more, query heads, value dim]``, written when there are several.
        partial_lse: float32 ``[rows * num_splits, query heads]``.
        num_splits: parts of each sequence's keys, at most 65,535.
        scale: as in `attend_items`.
        softcap: as in `attend_items`.
        window: as in `attend_items`.
        key_scales: as in `attend_items`.
        value_scales: as in `attend_items`.
        config: as in `attend_items`.
        sinks: ``[query heads]``; with several parts `merge_splits` takes them.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    check_attention(
        query, key_cache, value_cache, tables, positions, output, partial_output, partial_lse,
        max_group=TILE_ROWS[-1], window=window, sinks=sinks, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    num_rows, num_heads, key_dim = query.shape
    _, block_size, num_kv_heads, value_dim = value_cache.shape
    check_tensor("row_tables", row_tables, (num_rows,), (torch.int32,), query.device)
    if num_splits < 1:
        raise ValueError(f"num_splits: expected at least 1, got {num_splits}")
    check_at_most("num_splits", "parts", num_splits)
    check_at_most("query", "rows", num_rows)
    if num_splits > 1 and partial_output.shape[0] < num_rows * num_splits:
        raise ValueError(
            f"partial_output: expected {num_splits} for each of {num_rows} rows, got {list(partial_output.shape)}"
        )
    if num_rows == 0:
        return
    group = num_heads // num_kv_heads
    tile_rows = next(rows for rows in TILE_ROWS if rows >= group)
    key_tile, value_tile = triton.next_power_of_2(key_dim), triton.next_power_of_2(value_dim)
    config = config or tile_config(tile_rows, key_tile, value_tile, query.dtype, key_cache.dtype)
    kernel_scale, cap = score_factors(scale, softcap)
    _attend_split[(num_kv_heads, num_splits, num_rows)](
        query, key_cache, value_cache, tables, row_tables, positions,
        output, partial_output, partial_lse, sinks, key_scales, value_scales,
        kernel_scale, cap, kernel_window(window), num_splits, tables.stride(0),
        query.stride(0), query.stride(1), output.stride(0), output.stride(1),
        partial_output.stride(0), partial_output.stride(1), partial_lse.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        GROUP=group, ROWS=tile_rows, BLOCK_SIZE=block_size,
        KEY_DIM=key_dim, VALUE_DIM=value_dim, KEY_TILE=max(16, key_tile), VALUE_TILE=max(16, value_tile),
        WINDOW=window is not None, SOFTCAP=softcap is not None, SINKS=sinks is not None,
        QUANTISED=key_scales is not None, COMPUTE=compute_type(query.dtype),
        KEYS=config.keys, num_warps=config.warps, num_stages=config.stages,
    )  # fmt: skip
