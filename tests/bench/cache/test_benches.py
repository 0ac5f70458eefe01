"""The cache's benchmarks measure what they say, write what they should, and the soak finds what is broken."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from radixkv.bench.cache import bookkeeping, scaling, soak
from radixkv.bench.cache.hash_chain import HashChainCache
from radixkv.cache.radix_tree import RadixTree
from radixkv.cli.main import app

NAMES = """match_hit_4k match_hit_32k match_hit_128k match_hit_32k_list match_chain64_32k admit_hit_32k_list insert_cold_4k
insert_cold_32k insert_cold_128k evict_1_of_10k evict_1_of_100k evict_1_of_1m evict_2048_blocks_of_100k decode_step_256
decode_record_256 fork_16_of_4k beam_step_4_of_32k release_32k pool_100k_construct"""


def test_every_row_is_measured_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bookkeeping.rows()
    assert [row.name for row in rows] == NAMES.split()
    monkeypatch.setattr(bookkeeping, "rows", lambda: [row for row in rows if not row.name.startswith("evict")])
    bookkeeping.run_cache(Console(quiet=True), 1, tmp_path / "cache.json")
    document = json.loads((tmp_path / "cache.json").read_text())
    assert {"cpu", "date", "numpy"} <= document["machine"].keys()
    assert [row["name"] for row in document["rows"]] == [name for name in NAMES.split() if not name.startswith("evict")]
    assert all(0 < row["min_us"] <= row["median_us"] for row in document["rows"])
    assert 64 < document["host_bytes_per_block"]["in prompts of 32k tokens"] < 200


def test_eviction_is_timed_where_something_is_evicted() -> None:
    assert bookkeeping.evict_one(500, 2).min_us > 0
    assert bookkeeping.evict_one(500, 100).min_us > 0  # more rounds than there are leaves for


def test_the_baseline_knows_what_it_was_told() -> None:
    chain = HashChainCache(4)
    tokens = np.arange(22, dtype=np.int32)
    chain.insert(tokens, [7, 8, 9, 10, 11])
    assert chain.match(tokens[:19]) == [7, 8, 9, 10]
    tokens[6] += 1
    assert chain.match(tokens) == [7]


def test_curves_are_measured_drawn_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scaling, "_ROUNDS", 1)
    monkeypatch.setattr(scaling, "_LEAVES", (30, 100, 300))
    small = [replace(curve, sizes=curve.sizes[:3]) for curve in scaling.curves()]
    monkeypatch.setattr(scaling, "curves", lambda: small)
    scaling.run_scaling(Console(quiet=True), tmp_path / "scaling.json", tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    curves = json.loads((tmp_path / "scaling.json").read_text())["curves"]
    assert len(curves) == len(small)
    assert all(len(curve["median_us"]) == 3 for curve in curves)


def test_nothing_is_drawn_unless_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture was left in the folder in which the command was started."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(scaling, "curves", list)
    result = CliRunner().invoke(app, ["bench", "cache-scaling"])
    assert result.exit_code == 0, result.output
    assert not list(tmp_path.iterdir())


def test_an_exponent_is_that_of_the_upper_half() -> None:
    sizes = [1, 2, 4, 8, 16, 32]
    assert scaling.exponent(sizes, [9, 9, 9, 64, 256, 1024]) == pytest.approx(2.0)


def test_a_short_soak_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(soak, "_STEPS_PER_CACHE", 2000)
    assert soak.run_soak(Console(quiet=True), 0.01, 1, tmp_path / "soak.json")
    document = json.loads((tmp_path / "soak.json").read_text())
    assert document["steps"] > 1000
    assert document["failures"] == []
    assert document["evicted_blocks"] > 0
    assert document["copied_blocks"] > 0


def test_a_soak_finds_a_lock_that_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RadixTree, "lock_again", lambda self, node, count: None)
    assert not soak.run_soak(Console(quiet=True), 0.01, 1, None)


@pytest.mark.parametrize("arguments", [["cache", "--plot", "x.png"], ["cache-scaling", "--rounds", "2"]])
def test_an_option_that_would_do_nothing_is_refused(arguments: list[str]) -> None:
    """Both were one command, which ignored the options of the other half."""
    result = CliRunner().invoke(app, ["bench", *arguments])
    assert result.exit_code == 2
    assert "No such option" in result.output
