"""The batches that `radixkv bench plan` plans are what its rows say."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.attention.plan import common_blocks
from radixkv.bench.plan import BATCH, CHANGES, LEVELS, make_steps, run_plan


@pytest.mark.parametrize("changes", [1, 16])
def test_so_many_leave_and_join_and_the_rest_grow(changes: int) -> None:
    for before, after in itertools.pairwise(make_steps(LEVELS["nothing"], changes, 20)):
        old, new = ({chunk.owner: chunk for chunk in batch} for batch in (before, after))
        assert len(new) == len(after) == BATCH
        assert len(new.keys() - old.keys()) == changes
        for owner in new.keys() & old.keys():
            assert new[owner].num_context == old[owner].num_context + 1
            assert new[owner].block_ids[: len(old[owner].block_ids)].tolist() == old[owner].block_ids.tolist()
        blocks = [block for chunk in after for block in chunk.block_ids.tolist()]
        assert len(set(blocks)) == len(blocks)


def test_the_tree_has_its_levels() -> None:
    batch = make_steps(LEVELS["three levels, 73 nodes"], 16, 5)[-1]
    tables = sorted((chunk.block_ids for chunk in batch), key=lambda ids: ids.tolist())
    shared = [common_blocks(a, b) for a, b in itertools.pairwise(tables)]
    assert [shared.count(blocks) for blocks in (96, 160, 208)] == [7, 56, 192]


def test_every_row_is_measured_and_written(tmp_path: Path) -> None:
    run_plan(Console(quiet=True), 2, tmp_path / "plan.json")
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert [(row["shared"], row["changes"]) for row in rows] == [(name, k) for name in LEVELS for k in CHANGES]
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)
