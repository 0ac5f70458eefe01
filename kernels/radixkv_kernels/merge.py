"""Partial results into the final output, each weighed by its log-sum-exp.

A row's output is ``sum(2**lse_i * output_i) / sum(2**lse_i)`` over its partial results, a sink adding to the denominator
alone (Flash-Decoding, Dao et al. 2023; cascade merge, FlashInfer, Ye et al. 2024).

Bytes moved: ``partials * query heads * (value dim + 1) * 4`` read, ``rows * query heads * value dim`` elements written; the
floor on a GPU of B bytes/s is their sum over B. With 256 sequences in two parts each, 32 heads of 128 in bfloat16: 8 MB and
2 MB, 2.4 us at 4.3 TB/s, so that the launch itself counts for as much.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checked_once import checked_once
from radixkv_kernels.checks import (
    FLOATS,
    MAX_HEAD_DIM,
    check_at_most,
    check_device,
    check_tensor,
    check_written,
)
from radixkv_kernels.launch import Launch, launch
from radixkv_kernels.online_softmax import add_sink
from radixkv_kernels.target import COMPILE_OPTIONS

_PARTIALS = 4
# Numbers of partial results that a program, one warp, holds. So 256 rows of 32 heads are 2,048 programs, which all run at
# once: one program per head took twice the time on an H100, in four waves that each waited for four loads in turn.
_NUMBERS = 2048


@triton.jit(do_not_specialize=["num_splits"])
def _merge(
    partial_output, partial_lse, starts, partials, positions, output, sinks, num_splits,
    partial_row_stride, partial_head_stride, lse_row_stride, output_row_stride, output_head_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, LISTED: tl.constexpr, PARTIALS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """One program: one row and ``HEADS`` of its heads; grid (rows, parts of the heads).

    Row i's partials are those ``LISTED`` for it, or the i-th ``num_splits``. Shapes and types as in `merge_partials`. Strides
    in elements; the last of each tensor is 1.
    """
    row = tl.program_id(0)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    is_head = head < NUM_HEADS
    dim = tl.arange(0, VALUE_TILE)
    wanted = is_head[:, None] & (dim < VALUE_DIM)[None, :]
    head_64 = head.to(tl.int64)
    target = output + row.to(tl.int64) * output_row_stride + head_64[:, None] * output_head_stride + dim[None, :]
    if LISTED:
        start = tl.load(starts + row)
        count = tl.load(starts + row + 1) - start
        if count == 0:
            # Written already by its only item; or padding, which becomes 0, so that later layers meet no NaN.
            if tl.load(positions + row) < 0:
                tl.store(target, tl.zeros([HEADS, VALUE_TILE], tl.float32).to(output.dtype.element_ty), mask=wanted)
            return
    else:
        start = row.to(tl.int64) * num_splits
        count = num_splits
    total = tl.zeros([HEADS, VALUE_TILE], tl.float32)
    row_max = tl.full([HEADS], float("-inf"), tl.float32)
    row_sum = tl.zeros([HEADS], tl.float32)
    for first in tl.range(0, count, PARTIALS):
        index = first + tl.arange(0, PARTIALS)
        exists = index < count
        if LISTED:
            partial = tl.load(partials + start + index, mask=exists, other=0).to(tl.int64)
        else:
            partial = start + index
        lse = tl.load(
            partial_lse + partial[:, None] * lse_row_stride + head_64[None, :],
            mask=exists[:, None] & is_head[None, :],
            other=float("-inf"),
        )
        new_max = tl.maximum(row_max, tl.max(lse, 0))
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = tl.exp2(row_max - base)
        weight = tl.exp2(lse - base[None, :])
        # A partial result that saw no key weighs nothing, and may never have been written.
        mask = (weight > 0.0)[:, :, None] & (dim < VALUE_DIM)[None, None, :]
        offset = partial[:, None] * partial_row_stride + head_64[None, :] * partial_head_stride
        part = tl.load(partial_output + offset[:, :, None] + dim[None, None, :], mask=mask, other=0.0)
        total = total * shrink[:, None] + tl.sum(part * weight[:, :, None], 0)
        row_sum = row_sum * shrink + tl.sum(weight, 0)
        row_max = new_max
    if SINKS:
        row_sum = add_sink(row_max, row_sum, tl.load(sinks + head, mask=is_head, other=0.0))
    result = total / tl.where(row_sum == 0.0, 1.0, row_sum)[:, None]
    tl.store(target, result.to(output.dtype.element_ty), mask=wanted)


def merge_partials(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    starts: torch.Tensor,
    partials: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> Launch | None:
    """Merge the results of `attend_items`.

    The last dimension of every tensor is contiguous, other strides are free, but no two entries of the output may share
    memory.

    Args:
        partial_output: float32 ``[partials, query heads, value dim]``.
        partial_lse: float32 ``[partials, query heads]``, to base 2; minus infinity: the output counts for nothing.
        starts: int32 ``[rows + 1]``: row i's partial results are ``partials[starts[i] : starts[i + 1]]``. A row that has
            none is left as it is.
        partials: int32.
        positions: int32 ``[rows]``; a row without partial results at a negative position is padding and becomes 0.
        output: ``[rows, query heads, value dim]``, float32, float16 or bfloat16.
        sinks: ``[query heads]``, any of these types.

    Returns:
        See `write_cache`.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    _check(partial_output, partial_lse, output, sinks)
    _check_lists(starts, partials, positions, output.shape[0], output.device)
    return _launch(partial_output, partial_lse, starts, partials, positions, output, sinks, 0)


def merge_splits(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    *,
    num_splits: int,
    sinks: torch.Tensor | None = None,
) -> Launch | None:
    """Merge the results of `attend_split`: row i's are the partial results ``i * num_splits ..``; else as `merge_partials`.

    Returns:
        See `write_cache`.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    _check(partial_output, partial_lse, output, sinks)
    if num_splits < 1 or partial_output.shape[0] < output.shape[0] * num_splits:
        raise ValueError(
            f"num_splits: expected 1 to as many as {partial_output.shape[0]} partial results allow for each of "
            f"{output.shape[0]} rows, got {num_splits}"
        )
    return _launch(partial_output, partial_lse, None, None, None, output, sinks, num_splits)


@checked_once
def _check_lists(
    starts: torch.Tensor, partials: torch.Tensor, positions: torch.Tensor, num_rows: int, device: torch.device
) -> None:
    check_tensor("starts", starts, (num_rows + 1,), (torch.int32,), device)
    check_tensor("partials", partials, (None,), (torch.int32,), device)
    check_tensor("positions", positions, (num_rows,), (torch.int32,), device)


@checked_once
def _check(
    partial_output: torch.Tensor, partial_lse: torch.Tensor, output: torch.Tensor, sinks: torch.Tensor | None
) -> None:
    check_device("output", output.device)
    check_tensor("output", output, (None, None, None), FLOATS, output.device)
    check_written("output", output)
    _, num_heads, value_dim = output.shape
    if not 1 <= value_dim <= MAX_HEAD_DIM or num_heads < 1:
        raise ValueError(
            f"output: expected at least one head of a size of 1 to {MAX_HEAD_DIM}, got {list(output.shape)}"
        )
    check_at_most("output", "heads", num_heads)
    check_tensor("partial_output", partial_output, (None, num_heads, value_dim), (torch.float32,), output.device)
    check_tensor("partial_lse", partial_lse, (partial_output.shape[0], num_heads), (torch.float32,), output.device)
    if sinks is not None:
        check_tensor("sinks", sinks, (num_heads,), FLOATS, output.device)


def _launch(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    starts: torch.Tensor | None,
    partials: torch.Tensor | None,
    positions: torch.Tensor | None,
    output: torch.Tensor,
    sinks: torch.Tensor | None,
    num_splits: int,
) -> Launch | None:
    num_rows, num_heads, value_dim = output.shape
    if num_rows == 0:
        return None
    value_tile = triton.next_power_of_2(value_dim)
    heads = min(triton.next_power_of_2(num_heads), max(1, _NUMBERS // (_PARTIALS * value_tile)))
    return launch(
        _merge, (num_rows, triton.cdiv(num_heads, heads)),
        partial_output, partial_lse, starts, partials, positions, output, sinks, num_splits,
        partial_output.stride(0), partial_output.stride(1), partial_lse.stride(0), output.stride(0), output.stride(1),
        NUM_HEADS=num_heads, HEADS=heads, LISTED=starts is not None, PARTIALS=_PARTIALS,
        VALUE_DIM=value_dim, VALUE_TILE=value_tile, SINKS=sinks is not None,
        num_warps=1, **COMPILE_OPTIONS,
    )  # fmt: skip
