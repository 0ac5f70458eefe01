"""Three modest tenants beside a greedy one: what is promised, in steps, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

from rich.console import Console
from support.model_zoo import build_supported

from radixkv.bench.engine.fairness import ALONE, FAIR, FIRST_COME, FairnessLoad, run_fairness


def test_modest_tenants_hardly_notice_a_greedy_one(tmp_path: Path) -> None:
    load = FairnessLoad(modest_requests=8, greedy_requests=80)
    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    console = Console(file=(tmp_path / "out.txt").open("w"), width=200)
    run_fairness(console, build_supported("llama"), 1, figures, plot, load)
    document = json.loads(figures.read_text())
    for ratios in (document["ratios"], document["open_loop"]["ratios"]):
        assert ratios["p99_first_token_steps"] <= 1.5
        assert ratios["p99_first_token_tokens"] <= 1.5
        assert ratios["p99_first_token_steps_first_come"] > 20
        assert ratios["throughput_per_step"] >= 0.95
        assert ratios["hit_rate"] >= 0.97
    assert document["open_loop"]["load"]["open_loop"]
    for kind, count in ((ALONE, 72), (FAIR, 72), (FIRST_COME, 72)):
        (run,) = document["runs"][kind]
        assert len(run["steps_to_first_token"]) == len(run["seconds_to_first_token"]) == count
        assert len(run["tokens_to_first_token"]) == count
    assert len(document["runs"][FAIR][0]["greedy_steps_to_first_token"]) == 80
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "wanted: at most 1.5" in (tmp_path / "out.txt").read_text()
