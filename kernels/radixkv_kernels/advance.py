"""From one decoding step to the next without the host: every row advances by one token.

Bytes moved: a row reads its position, its table's number and a block id, 12 bytes, and writes position and slot, 12 more.
The floor on a GPU of B bytes/s is ``24 * rows / B``, nanoseconds, so that a launch is all it costs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checks import check_device, check_tables, check_tensor
from radixkv_kernels.target import COMPILE_OPTIONS

_ROWS = 128


@triton.jit(do_not_specialize=["num_rows", "table_stride"])
def _advance_rows(
    positions, slots, tables, row_tables, num_rows, table_stride, BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """One program: ``ROWS`` rows. Shapes and types as in `advance_rows`; ``table_stride`` in elements, other strides 1."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    exists = row < num_rows
    position = tl.load(positions + row, mask=exists, other=-1)
    runs = exists & (position >= 0)
    position = position + 1
    table = tl.load(row_tables + row, mask=runs, other=0).to(tl.int64)
    block = tl.load(tables + table * table_stride + position // BLOCK_SIZE, mask=runs, other=0).to(tl.int64)
    tl.store(positions + row, position, mask=runs)
    tl.store(slots + row, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=runs)


def advance_rows(
    positions: torch.Tensor, slots: torch.Tensor, tables: torch.Tensor, row_tables: torch.Tensor, *, block_size: int
) -> None:
    """Add 1 to every position that is not negative, and find the slot of its key and value.

    Args:
        positions: int32 ``[rows]``, contiguous as all vectors, changed in place; negative: padding, stays as it is, and so
            does its slot.
        slots: int64 ``[rows]``, written: block id * block_size + position in the block.
        tables: int32 ``[tables, blocks]``, any strides but the last; must reach to the new positions.
        row_tables: int32 ``[rows]``: which table each row reads through.

    Raises:
        ValueError: a shape, type or device that the kernel cannot take; nothing is written.
    """
    device = positions.device
    check_device("positions", device)
    check_tensor("positions", positions, (None,), (torch.int32,), device)
    num_rows = len(positions)
    check_tensor("slots", slots, (num_rows,), (torch.int64,), device)
    check_tables(tables, num_rows, device)
    check_tensor("row_tables", row_tables, (num_rows,), (torch.int32,), device)
    if block_size < 1:
        raise ValueError(f"block_size: expected at least 1, got {block_size}")
    if num_rows:
        _advance_rows[(triton.cdiv(num_rows, _ROWS),)](
            positions, slots, tables, row_tables, num_rows, tables.stride(0),
            BLOCK_SIZE=block_size, ROWS=_ROWS, **COMPILE_OPTIONS,
        )  # fmt: skip
