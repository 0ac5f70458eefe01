"""Blocks of a pool, which lie in many tensors, as rows of bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library


class _Rows(ctypes.Structure):
    """`Rows` of ``src/calls.h``."""

    _fields_ = (
        *pointers("parts", "part_bytes", "rows", "block_ids"),
        *sizes("num_parts", "num_rows", "row_bytes"),
        ("in_parallel", ctypes.c_int32),
    )


class BlockParts:
    """Tensors that each hold a part of every block; a block's row is its parts, one after the other.

    A call copies all blocks and parts without Python's lock. Any thread may call.

    Args:
        parts: ``[blocks, ...]`` on the CPU, contiguous, with equally many blocks, at least one.

    Attributes:
        row_bytes: size of a row.

    Raises:
        RuntimeError: there is no library for this processor.
        ValueError: a tensor is not as above.
    """

    def __init__(self, parts: Sequence[torch.Tensor]) -> None:
        if not parts:
            raise ValueError("parts: expected at least one tensor, got none")
        self._library = require_library()
        self._parts = list(parts)  # keeps their memory
        if not parts[0].dim() or not len(parts[0]):
            raise ValueError(f"parts: expected at least one block, got shape {list(parts[0].shape)}")
        self._num_blocks = len(parts[0])
        for part in parts:
            check_tensor("parts", part, [self._num_blocks, *part.shape[1:]], [part.dtype])
        sizes = [part[0].numel() * part.element_size() for part in parts]
        self.row_bytes = sum(sizes)
        self._addresses = (ctypes.c_void_p * len(parts))(*(part.data_ptr() for part in parts))
        self._sizes = (ctypes.c_int64 * len(parts))(*sizes)

    def read(self, block_ids: torch.Tensor, rows: torch.Tensor, *, in_parallel: bool) -> None:
        """Copy blocks into rows.

        Args:
            block_ids: int32 ``[rows]``.
            rows: uint8 ``[rows, row_bytes]``.
            in_parallel: use the computing threads. Only for a thread that has computed before: any other would start its own.

        Raises:
            ValueError: a tensor is not as above, or an id is of no block; nothing is written.
        """
        self._copy(block_ids, rows, in_parallel, into_rows=True)

    def write(self, block_ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Copy rows into blocks.

        Args:
            block_ids: int32 ``[rows]``, no two alike.
            rows: uint8 ``[rows, row_bytes]``.

        Raises:
            ValueError: a tensor is not as above, or an id is of no block; nothing is written.
        """
        self._copy(block_ids, rows, in_parallel=False, into_rows=False)

    def _copy(self, block_ids: torch.Tensor, rows: torch.Tensor, in_parallel: bool, *, into_rows: bool) -> None:
        check_tensor("block_ids", block_ids, [None], [torch.int32])
        check_tensor("rows", rows, [len(block_ids), self.row_bytes], [torch.uint8])
        if not len(block_ids):
            return
        # By numpy: each call of torch's releases Python's lock, and a thread that loads may get it back late.
        ids = block_ids.numpy()
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self._num_blocks:
            raise ValueError(f"block_ids: expected 0 to {self._num_blocks - 1}, got {lowest} to {highest}")
        call = _Rows(
            ctypes.addressof(self._addresses), ctypes.addressof(self._sizes), rows.data_ptr(), block_ids.data_ptr(),
            len(self._parts), len(block_ids), self.row_bytes, in_parallel,
        )  # fmt: skip
        self._library.rows(ctypes.addressof(call), into_rows)
