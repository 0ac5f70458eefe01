"""The bench of the disk tier reads and writes what it says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.bench.tiers import reads


def test_rates_are_of_the_tier_and_of_a_plain_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reads, "NUM_BLOCKS", 4)
    monkeypatch.setattr(reads, "BLOCK_BYTES", 5000)
    monkeypatch.setattr(reads, "NUM_INDEXED", 100)
    reads.run_tier_reads(Console(quiet=True), tmp_path, 1, tmp_path / "reads.json")
    document = json.loads((tmp_path / "reads.json").read_text())
    assert document["open_seconds"] > 0
    rates = document["gigabytes_per_second"]
    assert rates["memcpy"] > 0
    for kind in ("cached", "disk", "written"):
        assert rates[kind].keys() == {"plain", "tier", "sealed"}
        assert all(rate > 0 for rate in rates[kind].values())
    assert list(tmp_path.iterdir()) == [tmp_path / "reads.json"]  # what was written is removed
