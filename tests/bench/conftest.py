"""What the tests of benchmarks can omit, because they do not look at how long anything takes."""

from __future__ import annotations

import contextlib
import gc

import pytest

from radixkv.bench.cache import bookkeeping, scaling
from radixkv.bench.gpu import plan


@pytest.fixture(autouse=True)
def uncollected_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection before every figure takes longer than the figure, with all objects that earlier tests left."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    for module in (bookkeeping, plan, scaling):
        monkeypatch.setattr(module, "frozen_garbage", contextlib.nullcontext)
