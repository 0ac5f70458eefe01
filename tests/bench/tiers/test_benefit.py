"""`radixkv bench tiers` on a tiny model: its figures measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from support.model_zoo import build_shallow

from radixkv.bench.tiers import benefit, first_tokens, working_set, writing
from radixkv.bench.tiers.benefit import run_tiers


def run(model: Path, shared_cache: Path, json_path: Path | None = None, plot_path: Path | None = None) -> None:
    run_tiers(
        Console(quiet=True),
        str(model),
        conversations=8,
        turns=3,
        rounds=1,
        shared_cache=str(shared_cache),
        json_path=json_path,
        plot_path=plot_path,
    )


@pytest.mark.usefixtures("loads_are_worth_it")  # a tiny model computes about as fast as a tier reads
def test_every_row_is_measured_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_tokens, "RESTARTS", ((100, 0), (100, 20), (300, 20)))
    monkeypatch.setattr(working_set, "DOCUMENT_TOKENS", 40)
    monkeypatch.setattr(writing, "UNRELATED_TOKENS", 40)
    monkeypatch.setattr(writing, "UNRELATED_ANSWER", 4)
    build_shallow("llama").save_pretrained(tmp_path / "model")
    path, plot = tmp_path / "figures.json", tmp_path / "figures.svg"
    run(tmp_path / "model", tmp_path / "shared", path, plot)
    figures = json.loads(path.read_text())
    assert [row["cached_tokens"] for row in figures["restart"]] == [99, 100, 300]
    shares = {row["tier"]: row["cached_share"] for row in figures["working_set"]["rows"]}
    assert shares["none"] < 0.9 * shares["larger pool"]
    assert max(shares["host"], shares["disk"]) <= shares["larger pool"] * 1.05
    arrivals = {row["tier"]: row for row in figures["arrivals"]}
    assert list(arrivals) == ["none", "host", "disk"]
    assert arrivals["none"]["cached_share"] <= arrivals["disk"]["cached_share"]
    assert arrivals["disk"]["cached_share"] == pytest.approx(shares["larger pool"], rel=0.05)
    assert all(0 < row["ttft_p50"] <= row["ttft_p99"] for row in arrivals.values())
    assert set(figures["writing"]) == {"without_tiers", "write_back_ratio", "write_through_ratio"}
    assert figures["shared"]["cached_tokens"] == 99
    assert plot.read_text().startswith("<?xml")


def test_a_shared_store_that_cannot_be_opened_is_refused_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was when all else had been measured, for many minutes, of which no figure was kept."""
    build_shallow("llama").save_pretrained(tmp_path / "model")
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setattr(benefit, "measure_restart", None)
    with pytest.raises(ValueError, match="shared_cache: expected a folder"):
        run(tmp_path / "model", file)
