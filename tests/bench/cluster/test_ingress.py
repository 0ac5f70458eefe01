"""`radixkv bench cluster` from start to end, in small: a server, replicas and ingresses as real processes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from radixkv.bench.cluster import ingress
from radixkv.bench.serving.workload import LoadShape


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded_servers")
def test_each_path_is_measured_on_the_same_conversations(
    tiny_model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ingress, "_PROBES", 3)
    monkeypatch.setattr(ingress, "_CONVERSATIONS", LoadShape(4, 2, 2, 40, 10, 4, seed=1000))
    path = tmp_path / "cluster.json"
    ingress.run_cluster_bench(Console(width=200), str(tiny_model_folder), [2], 2, 2, path)
    figures: dict[str, Any] = json.loads(path.read_text())
    assert list(figures["costs"]) == ["one server", "1 replica", "2 replicas"]
    for reports in figures["costs"].values():
        assert [(report["completed"], report["failed"]) for report in reports] == [(2, 0)] * 2
    assert {name: len(seconds) for name, seconds in figures["first_tokens_beside_streams"].items()} == {
        "one server": 6,
        "1 replica": 6,
    }
    one, several = figures["conversations"]["one server"], figures["conversations"]["2 replicas"]
    for name in ("completed", "prompt_tokens", "output_tokens"):
        assert one[name] == several[name]
    assert one["completed"] == 8
    assert figures["cached_share"] == {"2 replicas": several["cached_tokens"] / one["cached_tokens"]}
    assert figures["equal_answers"].keys() == {"2 replicas"}
    assert [len(each) for each in figures["replicas_mib"].values()] == [2]
    printed = capsys.readouterr().out
    assert re.search(r"beside 1 streams in progress, a first token comes after [\d.]+ ms from one server", printed)
    assert re.search(r"4 conversations of 2 turns, 2 system prompts, 2 replicas of [\d,]+ MiB: [\d.]+% of", printed)
