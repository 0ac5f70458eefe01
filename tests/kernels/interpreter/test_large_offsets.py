"""Offsets beyond 2**31 elements, in every tensor that a kernel takes strides of: no index is multiplied in 32 bits.

Each tensor in turn is a view of a sparse file, apart in one dimension so far that its last entry lies beyond 2**31 elements
while the stride itself fits 32 bits, as Triton then passes it. Only the pages that are touched take memory or disk.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.kernel_cases import make_tree, relative_error

from radixkv_kernels import (
    OPEN_END,
    BlockCopier,
    advance_rows,
    attend_items,
    attend_split,
    merge_partials,
    merge_splits,
    reference,
    write_cache,
)

BOUND = 3e-6
Spread = Callable[[torch.Tensor, int], torch.Tensor]


@pytest.fixture
def spread(tmp_path: Path) -> Spread:
    """A tensor's copy whose last entry in a dimension lies beyond 2**31 elements."""

    def spread_out(tensor: torch.Tensor, dim: int) -> torch.Tensor:
        stride = -(-(2**31 + 4096) // (tensor.shape[dim] - 1) // 16) * 16
        assert stride < 2**31, "it takes three entries"
        strides = list(torch.empty(tensor.shape, device="meta").select(dim, 0).stride())
        strides.insert(dim, stride)
        inner = 1 + sum((size - 1) * own for size, own in zip(tensor.shape, strides, strict=True))
        # An offset cut to 32 bits is negative. It shall meet zeros in the file, not end the process.
        file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=2**31 + inner, dtype=tensor.dtype)
        return file.as_strided(tensor.shape, strides, 2**31).copy_(tensor)

    return spread_out


def attention_arguments() -> dict[str, Any]:
    """Three sequences of up to 60 tokens, 3 key-value heads with a group of 2."""
    case = make_tree(0, levels=[(3, 60)], heads=6, kv_heads=3, key_dim=16, value_dim=16)
    return {
        "query": case.query,
        "key_cache": case.key_cache,
        "value_cache": case.value_cache,
        "tables": case.tables,
        "positions": case.positions,
        "output": torch.zeros(3, 6, 16),
        "partial_output": torch.zeros(6, 6, 16),
        "partial_lse": torch.zeros(6, 6),
    }


SPREAD = [
    ("query", 0), ("query", 1), ("key_cache", 0), ("value_cache", 0), ("tables", 0),
    ("output", 0), ("output", 1), ("partial_output", 0), ("partial_output", 1), ("partial_lse", 0),
]  # fmt: skip


def assert_same(given: dict[str, Any], truth: dict[str, Any]) -> None:
    assert relative_error(given["output"], truth["output"]) < BOUND
    assert relative_error(given["partial_output"], truth["partial_output"]) < BOUND
    # A row that saw no key has minus infinity, for which no error can be computed.
    assert relative_error(given["partial_lse"].exp2(), truth["partial_lse"].exp2()) < BOUND


@pytest.mark.parametrize(("name", "dim"), SPREAD)
def test_items_are_attended_at_large_offsets(name: str, dim: int, spread: Spread) -> None:
    """One row has two partial results; the others get their output at once."""
    truth, given = attention_arguments(), attention_arguments()
    given[name] = spread(given[name], dim)
    items = [[0, 1, 0, 0, 16, 0], [0, 1, 0, 16, OPEN_END, 5], [1, 1, 1, 0, OPEN_END, -1], [2, 1, 2, 0, OPEN_END, -1]]
    reference.attend_items(**truth, items=torch.tensor(items), scale=0.25)
    attend_items(**given, items=torch.tensor(items, dtype=torch.int32), tile_rows=16, scale=0.25)
    assert_same(given, truth)


def split_options(num_splits: int) -> dict[str, Any]:
    return {"row_tables": torch.arange(3, dtype=torch.int32), "num_splits": num_splits, "scale": 0.25}


@functools.cache
def split_nearby(num_splits: int) -> dict[str, Any]:
    """What the kernel gives where all offsets are small; other tests hold it against the reference."""
    arguments = attention_arguments()
    attend_split(**arguments, **split_options(num_splits))
    return arguments


@pytest.mark.parametrize(("name", "dim"), SPREAD)
def test_splits_are_attended_at_large_offsets(name: str, dim: int, spread: Spread) -> None:
    num_splits = 1 if name == "output" else 2  # one part writes the output, several write partial results
    given = attention_arguments()
    given[name] = spread(given[name], dim)
    attend_split(**given, **split_options(num_splits))
    assert_same(given, split_nearby(num_splits))


@pytest.mark.parametrize(("name", "dim"), SPREAD[-5:])
def test_partial_results_are_merged_at_large_offsets(name: str, dim: int, spread: Spread) -> None:
    """One row's results are listed as 5 and 0; all other rows have two in order."""
    truth = {"output": torch.zeros(3, 6, 16), "partial_output": torch.randn(6, 6, 16), "partial_lse": torch.randn(6, 6)}
    given = {key: tensor.clone() for key, tensor in truth.items()}
    given[name] = spread(given[name], dim)
    lists = [torch.tensor(of, dtype=torch.int32) for of in ([0, 0, 0, 2], [5, 0], [0, 0, 0])]
    partials = [given["partial_output"], given["partial_lse"]]
    reference.merge_partials(truth["partial_output"], truth["partial_lse"], *lists, truth["output"])
    merge_partials(*partials, *lists, given["output"])
    assert_same(given, truth)
    reference.merge_splits(truth["partial_output"], truth["partial_lse"], truth["output"], num_splits=2)
    merge_splits(*partials, given["output"], num_splits=2)
    assert_same(given, truth)


@pytest.mark.parametrize(
    ("name", "dim"), [("key", 0), ("key", 1), ("value", 0), ("value", 1), ("key_cache", 0), ("value_cache", 0)]
)
def test_keys_and_values_are_written_at_large_offsets(name: str, dim: int, spread: Spread) -> None:
    given = {
        "key": torch.randn(3, 3, 16),
        "value": torch.randn(3, 3, 16),
        "key_cache": torch.zeros(4, 16, 3, 16),
        "value_cache": torch.zeros(4, 16, 3, 16),
    }
    truth = {key: tensor.clone() for key, tensor in given.items()}
    given[name] = spread(given[name], dim)
    slots = torch.tensor([63, 0, 17])
    reference.write_cache(**truth, slots=slots)
    write_cache(**given, slots=slots)
    assert all(torch.equal(given[key], tensor) for key, tensor in truth.items())


def test_blocks_are_copied_at_large_offsets(tmp_path: Path) -> None:
    """Blocks of 2**13 words: cut to 32 bits, the last block's offset would be that of block 2."""
    num_blocks = 2 ** (32 - 13) + 3
    shape = (num_blocks, 16, 4, 256)
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=math.prod(shape), dtype=torch.float16)
    cache = file.view(shape)
    cache[1], cache[-1] = torch.randn(2, 16, 4, 256).half()
    first, last = cache[1].clone(), cache[-1].clone()
    BlockCopier([cache]).copy([(1, num_blocks - 2, 16), (num_blocks - 1, 2, 16)])
    assert torch.equal(cache[-2], first)
    assert torch.equal(cache[2], last)


def test_rows_are_advanced_through_tables_at_large_offsets(spread: Spread) -> None:
    tables = spread(torch.tensor([[1, 2], [3, 4], [5, 6]], dtype=torch.int32), 0)
    positions, slots = torch.tensor([15, 3], dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    advance_rows(positions, slots, tables, torch.tensor([2, 1], dtype=torch.int32), block_size=16)
    assert slots.tolist() == [6 * 16, 3 * 16 + 4]
