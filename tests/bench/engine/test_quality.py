"""What quantised weights cost the default model in quality is little, and is written as it is measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from radixkv.bench.engine import quality
from radixkv_cpu import library


@pytest.mark.slow
@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_the_default_model_stays_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("WINDOW", 256), ("NUM_WINDOWS", 1), ("NUM_PROMPTS", 1), ("ANSWER_TOKENS", 24)):
        monkeypatch.setattr(quality, name, value)
    settings = [setting for setting in quality.SETTINGS if setting[0] == "float32"]
    monkeypatch.setattr(quality, "SETTINGS", settings)
    quality.run_quality(Console(quiet=True), tmp_path / "quality.json")
    document = json.loads((tmp_path / "quality.json").read_text())
    assert {"cpu", "torch", "variant"} <= document["machine"].keys()
    plain, *narrow = document["rows"]
    assert [(row["dtype"], row["quantization"]) for row in document["rows"]] == settings
    assert plain["same_tokens"] == plain["of_tokens"] == 24
    for row, share in zip(narrow, (8.5 / 32, 6 / 32), strict=True):
        assert row["weights_mb"] < 1.01 * share * plain["weights_mb"]
        assert 0.98 < row["perplexity"] / plain["perplexity"] < 1.02
        assert row["same_tokens"] >= 22
