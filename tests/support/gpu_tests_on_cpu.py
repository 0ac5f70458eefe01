"""A plugin with which tests that need a GPU run without one, as far as their models do on a CPU: `pytest -p`."""

from __future__ import annotations

import pytest
import torch


def pytest_configure() -> None:
    """Models stay where they are."""
    torch.nn.Module.cuda = lambda module: module  # type: ignore[assignment, method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Nothing is skipped for want of a GPU."""
    for node in {node for item in items for node in item.listchain()}:
        node.own_markers = [mark for mark in node.own_markers if mark.name not in ("gpu", "skipif")]
