"""What several tests of models need."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models, which does not exist yet."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"
