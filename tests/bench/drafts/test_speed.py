"""The benchmark of drafts on a tiny model: the same tokens, counted, written and drawn."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from support.chat_templates import TEMPLATES, make_tokenizer
from support.model_zoo import build

from radixkv.bench.drafts.speed import run_drafts
from radixkv.drafting.step_times import StepTimes


def test_rows_are_measured_compared_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # How many rows are worth their time must not depend on the machine.
    monkeypatch.setattr(StepTimes, "predict", lambda self, num_rows: np.ones(len(num_rows)))
    tokenizer = make_tokenizer(TEMPLATES["json"])

    def model() -> Any:
        return build("llama", {"vocab_size": len(tokenizer), "max_position_embeddings": 2048})

    figures, plot = tmp_path / "figures.json", tmp_path / "plot.png"
    console = Console(file=(tmp_path / "out.txt").open("w"), width=200)
    options: Any = {"rounds": 1, "dtype": "float32", "num_tokens": 12, "make_model": model, "tokenizer": tokenizer}
    only = ["asked again, temp", "16 side"]
    rows = run_drafts(console, only=only, json_path=figures, plot_path=plot, **options)
    again, creative = json.loads(figures.read_text())["rows"]
    assert [again["name"], creative["name"]] == ["asked again, temperature 0.8", "16 side by side, temperature 1"]
    assert again["tokens"] == 16 * 12
    assert creative["tokens"] == 16 * 12 * len(creative["without"])
    assert again["differences"] == creative["differences"] == []
    assert sum(counts["accepted"] for counts in again["drafts"].values()) > 16
    assert 0 <= creative["repeated_share"] <= 1
    assert [row.ratio for row in rows] == [again["ratio"], creative["ratio"]]
    assert plot.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--only: 'nothing' is in no name"):
        run_drafts(console, only=["nothing"], json_path=None, plot_path=None, **options)
