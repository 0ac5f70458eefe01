"""What the tests of benchmarks do without, because they do not look at how long anything takes."""

from __future__ import annotations

import contextlib

import pytest

from radixkv.bench import cache, plan, scaling


@pytest.fixture
def unfrozen_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection before every figure takes longer than the figure, among the objects of all tests before."""
    for module in (cache, plan, scaling):
        monkeypatch.setattr(module, "frozen_garbage", contextlib.nullcontext)
