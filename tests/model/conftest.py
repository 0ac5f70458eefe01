"""What several tests of models need."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.hub_cache import Checkpoint, cached_snapshot


@pytest.fixture
def model_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of converted models, which does not exist yet."""
    monkeypatch.setenv("RADIXKV_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["folder", "hub id"])
def checkpoint_given(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Checkpoint:
    """An empty folder, given as such and as a model of the hub that was fetched before."""
    if request.param == "folder":
        return Checkpoint(tmp_path, str(tmp_path))
    return Checkpoint(cached_snapshot(tmp_path / "hub", "some/model", monkeypatch), "some/model")
