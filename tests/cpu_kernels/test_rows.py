"""Blocks of many tensors as rows of bytes, for every compiled variant, with NaN around what is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.cpu_variants import each_variant, guarded, is_untouched, use

from radixkv_cpu import BlockParts

SHAPES = [(9, 4, 2, 3), (9, 4, 1, 8), (9, 5)]


@each_variant
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("ids", [[3, 4, 5], [8, 0, 7, 2], [1], []], ids=str)
def test_blocks_become_rows_and_rows_blocks(variant: str, num_threads: int, ids: list[int]) -> None:
    """Bit for bit, and no others."""
    torch.manual_seed(0)
    parts, arounds = zip(*(guarded(torch.randn(shape)) for shape in SHAPES), strict=True)
    with use(variant, num_threads):
        blocks = BlockParts(parts)
        expected = torch.cat([part[ids].flatten(1).view(torch.uint8) for part in parts], dim=1)
        assert blocks.row_bytes == expected.shape[1] == 4 * (24 + 32 + 5)
        block_ids, rows = torch.tensor(ids, dtype=torch.int32), torch.empty_like(expected)
        blocks.read(block_ids, rows, in_parallel=num_threads > 1)
        assert torch.equal(rows, expected)
        before = [part.clone() for part in parts]
        blocks.write(block_ids, ~rows)
    for part, old, around in zip(parts, before, arounds, strict=True):
        old[ids] = (~old[ids].view(torch.int32)).view(torch.float32)
        assert torch.equal(part.view(torch.int32), old.view(torch.int32))
        assert is_untouched(around)


BAD_ROWS: dict[str, tuple[str, Any, str]] = {
    "ids type": ("block_ids", torch.tensor([0, 1]), "block_ids: expected int32, got int64"),
    "id too high": ("block_ids", torch.tensor([0, 9], dtype=torch.int32), "block_ids: expected 0 to 8, got 0 to 9"),
    "id too low": ("block_ids", torch.tensor([-1, 1], dtype=torch.int32), "block_ids: expected 0 to 8, got -1 to 1"),
    "rows": ("rows", torch.ones(3, 244, dtype=torch.uint8), r"rows: expected shape \[2, 244\], got \[3, 244\]"),
    "row bytes": ("rows", torch.ones(2, 243, dtype=torch.uint8), r"rows: expected shape \[2, 244\], got \[2, 243\]"),
    "rows type": ("rows", torch.ones(2, 244), "rows: expected uint8, got float32"),
    "rows strides": ("rows", torch.ones(2, 488, dtype=torch.uint8)[:, ::2], "rows: expected a contiguous tensor"),
}


@each_variant
@pytest.mark.parametrize(("name", "tensor", "message"), BAD_ROWS.values(), ids=BAD_ROWS)
def test_bad_rows_are_refused(variant: str, name: str, tensor: torch.Tensor, message: str) -> None:
    parts = [torch.zeros(shape) for shape in SHAPES]
    arguments = {"block_ids": torch.tensor([0, 1], dtype=torch.int32), "rows": torch.ones(2, 244, dtype=torch.uint8)}
    with use(variant):
        blocks = BlockParts(parts)
        with pytest.raises(ValueError, match=message):
            blocks.write(**arguments | {name: tensor})
        with pytest.raises(ValueError, match=message):
            blocks.read(**arguments | {name: tensor}, in_parallel=False)
    assert not any(part.any() for part in parts)


@each_variant
@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "parts: expected at least one tensor, got none"),
        ([torch.zeros(0, 4)], r"parts: expected at least one block, got shape \[0, 4\]"),
        ([torch.tensor(1.0)], r"parts: expected at least one block, got shape \[\]"),
        ([torch.zeros(9, 2), torch.tensor(1.0)], r"parts: expected shape \[9\], got \[\]"),
        ([torch.zeros(9, 2), torch.zeros(8, 2)], r"parts: expected shape \[9, 2\], got \[8, 2\]"),
        ([torch.zeros(9, 4)[:, ::2]], "parts: expected a contiguous tensor"),
    ],
    ids=["none", "no blocks", "a number", "a number beside blocks", "another number of blocks", "strides"],
)
def test_bad_parts_are_refused(variant: str, parts: list[torch.Tensor], message: str) -> None:
    with use(variant), pytest.raises(ValueError, match=message):
        BlockParts(parts)
