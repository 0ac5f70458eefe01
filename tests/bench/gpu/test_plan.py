"""The batches that `radixkv bench plan` plans are the ones that its rows name."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.attention.batch_tables import common_blocks
from radixkv.bench.gpu import plan
from radixkv.bench.gpu.plan import BATCH, BLOCK_SIZE, CHANGES, LEVELS, Change, Decoding, make_steps, run_plan


@pytest.mark.parametrize("change", [Change(1), Change(1, elsewhere=True), Change(16)])
def test_so_many_leave_and_join_and_the_rest_grow(change: Change) -> None:
    for before, after in itertools.pairwise(make_steps(LEVELS["nothing"], change, 20)):
        old, new = ({sequence.owner: sequence for sequence in batch} for batch in (before, after))
        assert len(new) == len(after) == BATCH
        assert len(new.keys() - old.keys()) == change.count
        for owner in new.keys() & old.keys():
            assert new[owner].length == old[owner].length + 1
            assert new[owner].table is old[owner].table
        assert all(len(sequence.table.block_ids) * BLOCK_SIZE > sequence.length for sequence in after)
        blocks = [block for sequence in after for block in sequence.table.block_ids.tolist()]
        assert len(set(blocks)) == len(blocks)


def common_of_neighbours(batch: list[Decoding]) -> list[int]:
    tables = sorted((sequence.table.block_ids for sequence in batch), key=lambda ids: ids.tolist())
    return [common_blocks(a, b) for a, b in itertools.pairwise(tables)]


def test_the_tree_has_its_levels() -> None:
    first, *_, last = make_steps(LEVELS["three levels, 73 nodes"], Change(16), 5)
    shared = common_of_neighbours(last)
    assert [shared.count(blocks) for blocks in (96, 160, 208)] == [7, 56, 192]
    assert shared == common_of_neighbours(first)


def test_who_joins_elsewhere_changes_the_tree() -> None:
    steps = make_steps(LEVELS["three levels, 73 nodes"], Change(1, elsewhere=True), 20)
    trees = [common_of_neighbours(batch) for batch in steps]
    assert sum(a != b for a, b in itertools.pairwise(trees)) > 15
    assert all({96, 160, 208} == set(tree) for tree in trees)


def test_every_row_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "ROUNDS", 1)
    run_plan(Console(quiet=True), 2, tmp_path / "plan.json")
    rows = json.loads((tmp_path / "plan.json").read_text())["rows"]
    assert [(row["shared"], row["change"]) for row in rows] == [(name, k) for name in LEVELS for k in CHANGES]
    assert all(0 < row["min_us"] <= row["median_us"] for row in rows)
