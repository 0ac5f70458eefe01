"""Split-KV decoding in the interpreter, against plain torch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.kernel_cases import make_tree, relative_error

from radixkv_kernels import advance_rows, attend_split, merge_splits, reference

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 19},
    "softcap": {"softcap": 2.0},
    "sinks": {"sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])},
    "all": {"window": 40, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0])},
}


# With one part, the kernel adds sinks; with more, the merge does.
@pytest.mark.parametrize(
    ("num_splits", "name"),
    [(1, "plain"), (1, "sinks"), (1, "all"), (2, "window"), (2, "softcap"), (2, "all"), (5, "plain"), (5, "sinks")],
)
def test_parts_together_are_the_whole(num_splits: int, name: str) -> None:
    """More parts than a short sequence has tiles leave some of them empty."""
    options = OPTIONS[name]
    case = make_tree(20, levels=[(5, 150)], heads=6, kv_heads=2, padding=1)
    rows, heads, dim = case.query.shape
    truth = torch.zeros_like(case.query)
    for row, position in enumerate(case.positions.tolist()):
        item = torch.tensor([[row, int(position >= 0), row, 0, 2**31 - 1, -1]])
        arguments = (case.query, case.key_cache, case.value_cache, case.tables, case.positions)
        reference.attend_items(*arguments, item, truth, truth, truth, scale=0.125, **options)
    output = torch.full_like(case.query, float("nan"))
    partials = torch.full((rows * num_splits + 3, heads, dim), float("nan"))
    lse = torch.full((rows * num_splits + 3, heads), float("nan"))
    attend_split(
        *arguments[:4],
        torch.arange(rows, dtype=torch.int32),
        case.positions,
        output,
        partials,
        lse,
        num_splits=num_splits,
        scale=0.125,
        **options,
    )
    if num_splits > 1:
        assert torch.isnan(output).all()
        merge_splits(partials, lse, output, num_splits=num_splits, sinks=options.get("sinks"))
    assert relative_error(output, truth) < 3e-6
    assert torch.isnan(lse[rows * num_splits :]).all()


def test_float8_cache() -> None:
    case = make_tree(21, levels=[(3, 60)], cache_dtype=torch.float8_e4m3fn)
    options = {"key_scales": torch.tensor([0.5, 2.0]), "value_scales": torch.tensor([3.0, 0.25])}
    truth, output = torch.full_like(case.query, float("nan")), torch.full_like(case.query, float("nan"))
    arguments = (case.query, case.key_cache, case.value_cache, case.tables, case.positions)
    items = torch.tensor([[row, 1, row, 0, 2**31 - 1, -1] for row in range(3)])
    reference.attend_items(*arguments, items, truth, truth, truth, scale=0.125, **options)
    partials, lse = torch.empty(6, 4, 64), torch.empty(6, 4)
    attend_split(
        *arguments[:4], torch.arange(3, dtype=torch.int32), case.positions, output, partials, lse,
        num_splits=2, scale=0.125, **options,
    )  # fmt: skip
    merge_splits(partials, lse, output, num_splits=2)
    assert relative_error(output, truth) < 3e-6


def test_rows_move_on_by_a_token() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = torch.randint(0, 1000, (7, 5), generator=generator, dtype=torch.int32)
    row_tables = torch.tensor([3, 0, 6, 2], dtype=torch.int32)
    positions = torch.tensor([0, 15, -1, 78], dtype=torch.int32)
    slots = torch.full((4,), -1)
    advance_rows(positions, slots, tables, row_tables, block_size=16)
    assert positions.tolist() == [1, 16, -1, 79]
    assert slots.tolist() == [int(tables[3, 0]) * 16 + 1, int(tables[0, 1]) * 16, -1, int(tables[2, 4]) * 16 + 15]
