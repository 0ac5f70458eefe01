"""Attention over work items and the merge of their results, in the interpreter, against plain torch in float64."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
from support.kernel_cases import Case, make_tree, relative_error
from triton import next_power_of_2

from radixkv_kernels import attend_items, attention_common, merge_partials, reference
from radixkv_kernels.online_softmax import reads_pairs

# Inputs are rounded before both sides see them, so only float32 arithmetic and the rounding of the output differ. The
# interpreter cuts bfloat16 results off instead of rounding them.
BOUNDS = {torch.float32: 3e-6, torch.float16: 5e-4, torch.bfloat16: 6e-3}


def run(case: Case, **options: Any) -> None:
    """Attend and merge by kernel and by reference; partial results and outputs must agree."""
    truth, truth_partials, truth_lse = case.outputs()
    output, partials, lse = case.outputs()
    arguments = (case.query, case.key_cache, case.value_cache, case.tables, case.positions)
    merge_options = {"sinks": options.get("sinks")}
    for tile, items in case.items.items():
        reference.attend_items(*arguments, items, truth, truth_partials, truth_lse, **options)
        attend_items(*arguments, items, output, partials, lse, tile_rows=tile, **options)
    if case.num_partials:
        seen = truth_lse > float("-inf")
        assert torch.equal(lse > float("-inf"), seen)
        assert relative_error(lse[seen], truth_lse[seen]) < 3e-6
        assert relative_error(partials[seen], truth_partials[seen]) < 3e-6
    merge = (case.starts, case.partials, case.positions)
    reference.merge_partials(truth_partials, truth_lse, *merge, truth, **merge_options)
    merge_partials(partials, lse, *merge, output, **merge_options)
    assert relative_error(output, truth) < BOUNDS[case.query.dtype]


@pytest.mark.parametrize(
    "levels",
    [[(3, 100)], [(1, 64), (3, 48), (7, 40)], [(1, 32), (2, 32), (4, 16), (9, 33)]],
    ids=["flat", "three levels", "four levels"],
)
def test_trees_of_any_depth(levels: list[tuple[int, int]]) -> None:
    run(make_tree(1, levels=levels), scale=0.125)


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_element_types(dtype: torch.dtype) -> None:
    run(make_tree(1, levels=[(1, 96), (5, 40)], dtype=dtype), scale=0.125)


@pytest.mark.parametrize("tile_rows", [16, 64, 128])
def test_every_tile_class(tile_rows: int) -> None:
    """With a few more rows than one tile has."""
    levels = [(1, 80), (tile_rows // 3 + 3, 20)]
    run(make_tree(2, levels=levels, tile_rows=tile_rows, heads=3, kv_heads=1, split=100), scale=0.1)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_block_sizes(block_size: int) -> None:
    run(make_tree(3, levels=[(1, 128), (4, 90)], block_size=block_size), scale=0.125)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "key_dim", "value_dim"),
    [(4, 4, 64, 64), (4, 1, 80, 80), (2, 1, 96, 64), (16, 1, 128, 128), (6, 2, 192, 128), (24, 1, 256, 256), (2, 2, 40, 72)],
)  # fmt: skip
def test_head_shapes(heads: int, kv_heads: int, key_dim: int, value_dim: int) -> None:
    case = make_tree(4, levels=[(1, 32), (3, 30)], heads=heads, kv_heads=kv_heads, key_dim=key_dim, value_dim=value_dim)
    run(case, scale=key_dim**-0.5)


@pytest.mark.parametrize("window", [1, 7, 50, 1000])
def test_sliding_windows(window: int) -> None:
    """Windows of an item's rows end in different places, some before the item begins."""
    run(make_tree(5, levels=[(1, 96), (2, 64), (6, 60)]), scale=0.125, window=window)


def test_a_window_beyond_what_int32_can_subtract() -> None:
    """Also for an item of padding alone, which begins beyond its row's position."""
    case = make_tree(5, levels=[(1, 96), (2, 64), (6, 60)], padding=1)
    padding = len(case.positions) - 1
    for items in case.items.values():
        items[-1] = torch.tensor([padding, 1, 0, 64, 96, case.num_partials])
    case.partials = torch.cat([case.partials, torch.tensor([case.num_partials], dtype=torch.int32)])
    case.starts[-1] += 1
    case.num_partials += 1
    for window in (2**31 - 1, 2**40):
        run(case, scale=0.125, window=window)


def test_softcap_sinks_and_window_together() -> None:
    case = make_tree(6, levels=[(1, 64), (5, 40)])
    sinks = torch.randn(4)
    run(case, scale=0.5, softcap=3.0)
    run(case, scale=0.5, sinks=sinks)
    run(case, scale=0.5, softcap=3.0, sinks=sinks, window=33)


def test_sinks_of_items_that_are_written_at_once() -> None:
    run(make_tree(7, levels=[(4, 40)]), scale=0.125, sinks=torch.randn(4))


def test_float8_cache_with_scales_per_head() -> None:
    case = make_tree(8, levels=[(1, 64), (4, 40)], cache_dtype=torch.float8_e4m3fn)
    run(case, scale=0.125, key_scales=torch.tensor([0.5, 2.0]), value_scales=torch.tensor([3.0, 0.25]))


@pytest.mark.parametrize(("value_dim", "in_pairs"), [(48, True), (33, False), (16, False)])
def test_float8_values_of_any_size(value_dim: int, in_pairs: bool) -> None:
    case = make_tree(8, levels=[(1, 64), (4, 40)], cache_dtype=torch.float8_e4m3fn, value_dim=value_dim)
    assert reads_pairs(16, case.value_cache, next_power_of_2(value_dim)) == in_pairs
    run(case, scale=0.125, key_scales=torch.tensor([0.5, 2.0]), value_scales=torch.tensor([3.0, 0.25]))


def test_float8_values_of_which_words_would_begin_at_odd_addresses() -> None:
    case = make_tree(8, levels=[(1, 64), (4, 40)], cache_dtype=torch.float8_e4m3fn)
    blocks, size, heads, dim = case.value_cache.shape
    wider = torch.zeros(blocks, size, heads, dim + 1).to(torch.float8_e4m3fn)
    wider[..., :dim] = case.value_cache
    case = replace(case, value_cache=wider[..., :dim])
    assert not reads_pairs(16, case.value_cache, dim)
    run(case, scale=0.125, key_scales=torch.tensor([0.5, 2.0]), value_scales=torch.tensor([3.0, 0.25]))


def test_a_float8_cache_is_multiplied_in_float16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU. What is beyond its range is held at its end, so that no infinity becomes NaN."""
    monkeypatch.setattr(attention_common, "compute_type", lambda query_dtype, cache_dtype: tl.float16)
    case = make_tree(8, levels=[(1, 64), (4, 40)], dtype=torch.bfloat16, cache_dtype=torch.float8_e4m3fn)
    case.query[0] *= 1e38
    output, partials, lse = case.outputs()
    scales = {"key_scales": torch.tensor([0.5, 2.0]), "value_scales": torch.tensor([3.0, 0.25])}
    truth, truth_partials, truth_lse = case.outputs()
    arguments = (case.query, case.key_cache, case.value_cache, case.tables, case.positions)
    for tile, items in case.items.items():
        attend_items(*arguments, items, output, partials, lse, tile_rows=tile, scale=0.125, **scales)
        reference.attend_items(*arguments, items, truth, truth_partials, truth_lse, scale=0.125, **scales)
    assert torch.isfinite(partials).all()
    others = case.partials[case.starts[1] :].long()
    assert relative_error(partials[others], truth_partials[others]) < 5e-4


def test_padding_rows_become_zero_and_empty_items_do_nothing() -> None:
    case = make_tree(9, levels=[(1, 32), (3, 20)], padding=2)
    run(case, scale=0.125)
    output, partials, lse = case.outputs()
    for tile, items in case.items.items():
        attend_items(
            case.query, case.key_cache, case.value_cache, case.tables, case.positions, items, output, partials, lse,
            tile_rows=tile, scale=0.125,
        )  # fmt: skip
    merge_partials(partials, lse, case.starts, case.partials, case.positions, output)
    assert torch.equal(output[-2:], torch.zeros_like(output[-2:]))


def test_more_partial_results_than_are_merged_at_a_time() -> None:
    """Later ones weigh more; a row without any stays as it is, also the first of a sequence, unless it is padding."""
    partials, lse = torch.randn(9, 3, 16), torch.arange(27.0).view(9, 3)
    lists = [torch.tensor(numbers, dtype=torch.int32) for numbers in ([0, 9, 9, 9], range(9), [8, 0, -1])]
    output, truth = torch.ones(3, 3, 16), torch.ones(3, 3, 16)
    merge_partials(partials, lse, *lists, output)
    reference.merge_partials(partials, lse, *lists, truth)
    assert relative_error(output, truth) < BOUNDS[torch.float32]
    assert torch.equal(output[1:].mean((1, 2)), torch.tensor([1.0, 0.0]))


def test_large_scores_do_not_overflow() -> None:
    case = make_tree(10, levels=[(1, 32), (3, 40)])
    case.query *= 1000
    run(case, scale=1.0)


@pytest.mark.parametrize("window", [None, 20])
def test_a_prompts_rows_see_the_cached_prefix_and_themselves_causally(window: int | None) -> None:
    """Tiles of neighbouring rows of one sequence, whose last keys are their own; other rows stand before them."""
    case = make_tree(11, levels=[(1, 150)], heads=6, kv_heads=2)
    length, before, num_new, group = int(case.positions[0]) + 1, 2, 37, 3
    case.query = torch.randn(before + num_new, 6, 64)
    case.positions = torch.tensor([-1] * before + list(range(length - num_new, length)), dtype=torch.int32)
    for tile in (16, 64, 128):
        per_tile = tile // group
        case.items = {
            tile: torch.tensor(
                [
                    [before + at, min(per_tile, num_new - at), 0, 0, length - num_new + min(at + per_tile, num_new), -1]
                    for at in range(0, num_new, per_tile)
                ],
                dtype=torch.int32,
            )
        }
        case.starts = torch.zeros(before + num_new + 1, dtype=torch.int32)
        run(case, scale=0.125, window=window)
