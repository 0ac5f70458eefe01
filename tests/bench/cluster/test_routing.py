"""`radixkv bench routing` decides about prompts that replicas hold in part."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.bench.cluster import routing
from radixkv.routing import Router


def test_its_rows_and_its_prompts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "NUM_BLOCKS", 2000)
    routing.run_routing(Console(quiet=True), 20, tmp_path / "routing.json")
    rows = json.loads((tmp_path / "routing.json").read_text())["rows"]
    assert [row["name"] for row in rows] == [
        "choose a replica",
        "note its first token and its end",
        "choose one for 32,000 tokens that are new",
        "hash a prompt of 4,096 tokens",
    ]
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows)
    router = Router(routing.BLOCK_SIZE)
    router.add("a")
    (prompt, *_) = routing.fill(router, 100, random.Random(1))
    placement = router.choose(prompt, len(prompt) * routing.BLOCK_SIZE + 1)
    assert placement is not None
    assert placement.num_tokens == 1
