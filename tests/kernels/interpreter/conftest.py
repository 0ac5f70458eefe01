"""These tests run the kernels in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The interpreter makes many small torch calls, which two threads only slow down."""
    torch.set_num_threads(1)
