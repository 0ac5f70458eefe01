"""What the bench of tile configurations measures is whole work with the right result."""

from __future__ import annotations

import pytest
import torch

from radixkv.bench.gpu.layer import Level, make_pool, tree_batch
from radixkv.bench.gpu.tiles import SCALE, Problem, candidates, flat_work, item_work, node_items, planned, row_items
from radixkv_kernels import TileConfig, reference


def problem(batch: int, levels: list[Level], num_new: int) -> Problem:
    return Problem.of(batch, levels, num_new, torch.float32, "cpu")


def truth(given: Problem) -> torch.Tensor:
    """Attention of every row over all that it sees."""
    output = torch.empty_like(given.query)
    unused = given.partial_results(0)
    items = torch.tensor(row_items(given, 16), dtype=torch.int32)
    reference.attend_items(
        given.query, given.pool.keys[0], given.pool.values[0], given.tables, given.positions, items, output, *unused,
        scale=SCALE,
    )  # fmt: skip
    return output


@pytest.mark.parametrize(("num_splits", "config"), [(1, None), (3, TileConfig(32, 4, 2))])
def test_flat_work_equals_attention(num_splits: int, config: TileConfig | None) -> None:
    given = problem(3, [Level(3, 100)], 1)
    flat_work(given, num_splits, config)()
    assert torch.allclose(given.output, truth(given), atol=1e-5)


def test_item_work_equals_attention_for_tails_and_prompts() -> None:
    for given, tile_rows in [(problem(3, [Level(3, 70)], 1), 16), (problem(2, [Level(2, 40)], 37), 64)]:
        given.output.fill_(float("nan"))
        item_work(given, row_items(given, tile_rows), tile_rows, TileConfig(32, 4, 2))()
        assert torch.allclose(given.output, truth(given), atol=1e-5)


def test_a_node_is_read_by_every_row_and_every_key_once() -> None:
    items = node_items(40, 200, 64, 48)
    seen = torch.zeros(40, 200, dtype=torch.int64)
    partials = []
    for row, count, table, start, stop, first in items:
        assert table == 0
        seen[row : row + count, start:stop] += 1
        partials += range(first, first + count)
    assert (seen == 1).all()
    assert sorted(partials) == list(range(len(partials)))
    assert len(items) > 3  # tiles of 16 rows, and more than one piece


@pytest.mark.parametrize("shared", [True, False])
def test_a_planned_batch_is_read_shared_or_flat(shared: bool) -> None:
    batch, num_blocks, _ = tree_batch(4, [Level(1, 64), Level(4, 32)], 1)
    plan = planned(batch, make_pool(num_blocks, torch.float32, "cpu"), shared).plan
    assert plan.is_flat != shared
    assert (plan.saved_tokens == 3 * 64) == shared


def test_candidates_are_what_is_used_and_others_each_once() -> None:
    configs = candidates(128)
    assert configs[0] == TileConfig(128, 8, 3)
    assert len(set(configs)) == len(configs) == 11
