"""One partial result per work item: a tile of query rows over a range of keys, wherever their blocks lie.

Three shapes of work, one kernel::

    shared prefix    rows of many sequences, all of whose positions are beyond the keys      64 or 128 rows per tile
    private tail     one decoding row over its own keys, open at the end                     16 or 64 rows per tile
    prompt           neighbouring rows of one sequence; the last keys are their own          64 or 128 rows per tile

The heads of a group are packed into a tile's rows, query row first: tile row ``m`` is query row ``m // group``, head
``m % group``. So each key of an item is read once for every query row and head that needs it. This is what makes a
prefix that k sequences share cost one reading rather than k (Hydragen, Juravsky et al. 2024; FlashInfer's cascades).

Bytes moved: per item ``keys * kv heads * (key dim + value dim) * bytes per element``, its rows' queries, ``rows * query
heads * key dim`` elements, and their results, ``rows * query heads * value dim`` elements, partial ones in float32. The
floor on a GPU of B bytes/s is their sum over B while a tile has fewer rows than the GPU has operations per byte (about 200 on
an H200), and for prompts ``4 * rows * keys * heads * dim / 2`` operations over its matrix rate.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.attention_common import attend_head, attention_constants, attention_strides, store_result
from radixkv_kernels.checks import MAX_PROGRAMS, check_at_most, check_attention, check_tensor
from radixkv_kernels.launch import Launch, launch
from radixkv_kernels.online_softmax import TileConfig, kernel_window, load_query, score_factors
from radixkv_kernels.work_items import ITEM_FIELDS, NO_PARTIAL

TILE_ROWS = (16, 64, 128)
"""Rows of a tile: query rows times the query heads of a key-value head. Tensor cores need at least 16."""


@triton.jit(do_not_specialize=["table_stride"])
def _attend_items(
    query, key_cache, value_cache, tables, positions, items,
    output, partial_output, partial_lse, sinks, key_scales, value_scales,
    scale, cap, window, table_stride,
    query_row_stride, query_head_stride, output_row_stride, output_head_stride,
    partial_row_stride, partial_head_stride, lse_row_stride,
    key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, QUANTISED: tl.constexpr,
    COMPUTE: tl.constexpr, PAIRS: tl.constexpr, FIELDS: tl.constexpr, NO_PARTIAL: tl.constexpr,
):  # fmt: skip
    """One program: one item and one key-value head. Heads run fastest, so that the heads of a token are read together.

    Shapes and types as in `attend_items`. Strides in elements; the last of each tensor is 1.
    """
    head = tl.program_id(0) % HEADS
    fields = items + (tl.program_id(0) // HEADS).to(tl.int64) * FIELDS
    num_rows = tl.load(fields + 1)
    if num_rows == 0:
        return
    row_start = tl.load(fields)
    table = tables + tl.load(fields + 2).to(tl.int64) * table_stride
    start = tl.load(fields + 3)
    end = tl.load(fields + 4)
    partial_start = tl.load(fields + 5)

    tile_row = tl.arange(0, ROWS)
    row = tile_row // GROUP
    wanted = row < num_rows
    query_head = head * GROUP + tile_row % GROUP
    row_position = tl.load(positions + row_start + row, mask=wanted, other=-1)
    first_position = tl.min(tl.where(wanted, row_position, 2147483647), 0)
    last_position = tl.max(row_position, 0)
    end = tl.minimum(end, last_position + 1)
    if WINDOW:
        start = tl.maximum(start, first_position - window + 1)
    tile = load_query(
        query, row_start + row, query_head, wanted, query_row_stride, query_head_stride, KEY_DIM, KEY_TILE, COMPUTE
    )
    result, row_max, row_sum = attend_head(
        tile, row_position, first_position, last_position,
        key_cache, value_cache, table, key_scales, value_scales, head,
        start, end, window, scale, cap,
        key_block_stride, key_slot_stride, key_head_stride, value_block_stride, value_slot_stride, value_head_stride,
        ROWS, KEYS, BLOCK_SIZE, KEY_DIM, VALUE_DIM, KEY_TILE, VALUE_TILE, WINDOW, SOFTCAP, QUANTISED, COMPUTE, PAIRS,
    )  # fmt: skip
    store_result(
        result, row_max, row_sum, partial_start == NO_PARTIAL, row_start + row, partial_start + row, query_head, wanted,
        output, partial_output, partial_lse, sinks,
        output_row_stride, output_head_stride, partial_row_stride, partial_head_stride, lse_row_stride,
        VALUE_DIM, VALUE_TILE, SINKS,
    )  # fmt: skip


def attend_items(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    items: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    tile_rows: int,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
    config: TileConfig | None = None,
) -> Launch | None:
    """Attend the items of one tile class.

    The last dimension of every tensor is contiguous, `items` wholly; other strides are free, but no two entries of an output
    may share memory, and a block's entries lie within 2**31 elements.

    Args:
        query: ``[rows, query heads, key dim]``, float32, float16 or bfloat16.
        key_cache: ``[num_blocks, block_size, kv heads, key dim]``, of the query's type or float8_e4m3fn.
        value_cache: ``[num_blocks, block_size, kv heads, value dim]``, likewise.
        tables: int32 ``[tables, blocks]``: block ids by position // block_size.
        positions: int32 ``[rows]``: each row's position; it sees no key beyond.
        items: int32 ``[items, ITEM_FIELDS]``, see `work_items`. An item has at most ``tile_rows // group`` rows.
        output: ``[rows, query heads, value dim]``, of the query's type, written by the items without a partial result.
        partial_output: float32 ``[partials, query heads, value dim]``, written by the others.
        partial_lse: float32 ``[partials, query heads]``, log-sum-exp to base 2; minus infinity: no key was seen.
        tile_rows: one of `TILE_ROWS`, at least the group.
        scale: of the scores.
        softcap: scores become ``softcap * tanh(score / softcap)``.
        window: how many tokens a row sees, itself included; None: all.
        sinks: ``[query heads]``, any of a query's types, one logit per head that has no value; only for items without a
            partial result (`merge` adds those of the others).
        key_scales: float32 ``[kv heads]``; a key is ``stored * scale``. Given if and only if the cache is float8.
        value_scales: float32 ``[kv heads]``, likewise.
        config: None: what `tile_config` says.

    Returns:
        See `write_cache`.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    if tile_rows not in TILE_ROWS:
        raise ValueError(f"tile_rows: expected one of {TILE_ROWS}, got {tile_rows}")
    check_attention(
        query, key_cache, value_cache, tables, positions, output, partial_output, partial_lse,
        max_group=tile_rows, window=window, sinks=sinks, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    check_tensor("items", items, (None, ITEM_FIELDS), (torch.int32,), query.device)
    if not items.is_contiguous():
        raise ValueError(f"items: expected a contiguous tensor, got strides {list(items.stride())}")
    num_kv_heads = key_cache.shape[2]
    check_at_most("items", f"for {num_kv_heads} heads", items.shape[0], MAX_PROGRAMS // num_kv_heads)
    if items.shape[0] == 0:
        return None
    kernel_scale, cap = score_factors(scale, softcap)
    return launch(
        _attend_items, (num_kv_heads * items.shape[0],),
        query, key_cache, value_cache, tables, positions, items,
        output, partial_output, partial_lse, sinks, key_scales, value_scales,
        kernel_scale, cap, kernel_window(window), tables.stride(0),
        *attention_strides(query, output, partial_output, partial_lse, key_cache, value_cache),
        HEADS=num_kv_heads, FIELDS=ITEM_FIELDS, NO_PARTIAL=NO_PARTIAL,
        **attention_constants(
            query, key_cache, value_cache, tile_rows, softcap=softcap, window=window, sinks=sinks, config=config,
        ),
    )  # fmt: skip
