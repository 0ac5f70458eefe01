"""Models in a hub's cache, as if they had been fetched before the network was gone."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
from huggingface_hub import constants

REVISION = "0123456789abcdef" * 2 + "01234567"


class Checkpoint(NamedTuple):
    """Where a test writes a model, and what it loads the model by."""

    folder: Path
    model: str


def cached_snapshot(cache: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a model's newest revision, to be filled by the caller; only what is in the cache can be read then.

    Args:
        cache: folder that becomes the hub's cache.
        model: id on the hub.
        monkeypatch: undoes it.
    """
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    of_model = cache / f"models--{model.replace('/', '--')}"
    (of_model / "refs").mkdir(parents=True)
    (of_model / "refs" / "main").write_text(REVISION)
    snapshot = of_model / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    return snapshot
