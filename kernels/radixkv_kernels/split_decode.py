"""Decoding where nothing is shared: one new token per sequence, its keys split into equal parts.

No items are needed: program (head, part, sequence) finds its keys from the sequence's position alone, so that a batch that
only grows changes nothing but the positions. Each part is as long as the others, a whole number of tiles (Flash-Decoding,
Dao et al. 2023).

Bytes moved: ``keys * kv heads * (key dim + value dim) * bytes per element`` over all sequences; 256 sequences of 4,096 tokens
with 8 heads of 128 in bfloat16 read 4.3 GB, whose floor on a GPU of B bytes/s is 4.3 GB / B (1.0 ms at 4.3 TB/s). The
queries and outputs, ``rows * query heads * (key dim + value dim)`` elements, are small beside them; with several parts, each
row has as many float32 results in place of its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.attention_common import attend_head, attention_constants, attention_strides, store_result
from radixkv_kernels.checks import check_at_most, check_attention, check_tensor
from radixkv_kernels.item_attention import TILE_ROWS
from radixkv_kernels.launch import Launch, launch
from radixkv_kernels.online_softmax import TileConfig, kernel_window, load_query, score_factors


@triton.jit(do_not_specialize=["num_splits", "table_stride"])
def _attend_split(
    query, key_cache, value_cache, tables, row_tables, positions,
    output, partial_output, partial_lse, sinks, key_scales, value_scales,
    scale, cap, window, num_splits, table_stride,
    query_row_stride, query_head_stride, output_row_stride, output_head_stride,
    partial_row_stride, partial_head_stride, lse_row_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QUANTISED: tl.constexpr,
    COMPUTE: tl.constexpr, PAIRS: tl.constexpr,
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
    # The part begins inside the window already, so that no key needs to be masked for the window.
    result, row_max, row_sum = attend_head(
        tile, row_position, position, position,
        key_cache, value_cache, tables + tl.load(row_tables + row).to(tl.int64) * table_stride,
        key_scales, value_scales, head,
        start, end, window, scale, cap,
        key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
        ROWS, KEYS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, False, SOFTCAP, QUANTISED, COMPUTE, PAIRS,
    )  # fmt: skip
    store_result(
        result, row_max, row_sum, num_splits == 1, row, row.to(tl.int64) * num_splits + part, query_head, wanted,
        output, partial_output, partial_lse, sinks,
        output_row_stride, output_head_stride, partial_row_stride, partial_head_stride, lse_row_stride,
        VALUE_DIM, VALUE_TILE, SINKS,
    )  # fmt: skip


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
) -> Launch | None:
    """Attend one row of each sequence to all its keys, in ``num_splits`` parts that `merge_splits` merges.

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
        sinks: ``[query heads]``; with several parts `merge_splits` adds them.

    Returns:
        See `write_cache`.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    check_attention(
        query, key_cache, value_cache, tables, positions, output, partial_output, partial_lse,
        max_group=TILE_ROWS[-1], window=window, sinks=sinks, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    num_rows, num_heads, _ = query.shape
    num_kv_heads = key_cache.shape[2]
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
        return None
    tile_rows = next(rows for rows in TILE_ROWS if rows >= num_heads // num_kv_heads)
    kernel_scale, cap = score_factors(scale, softcap)
    return launch(
        _attend_split, (num_kv_heads, num_splits, num_rows),
        query, key_cache, value_cache, tables, row_tables, positions,
        output, partial_output, partial_lse, sinks, key_scales, value_scales,
        kernel_scale, cap, kernel_window(window), num_splits, tables.stride(0),
        *attention_strides(query, output, partial_output, partial_lse, key_cache, value_cache),
        **attention_constants(
            query, key_cache, value_cache, tile_rows, softcap=softcap, window=window, sinks=sinks, config=config
        ),
    )  # fmt: skip
