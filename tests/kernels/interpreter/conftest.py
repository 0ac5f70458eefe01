"""These tests run the kernels in Triton's interpreter, which is chosen before Triton is imported."""

from __future__ import annotations

import functools
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents and not INTERPRETED:
            item.add_marker(pytest.mark.skip(reason="needs TRITON_INTERPRET=1"))


@pytest.fixture(autouse=True)
def one_thread() -> None:
    """The interpreter makes many small torch calls, which two threads only slow down."""
    torch.set_num_threads(1)


@functools.cache
def builtin_names(namespace: Any) -> tuple[str, ...]:
    return tuple(name for name, member in inspect.getmembers(namespace) if tl.core.is_builtin(member))


@pytest.fixture(autouse=True)
def names_of_builtins_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter looks through all of `triton.language` at each call of a device function: a third of its time."""

    def patch_builtins(namespace: Any, builder: Any, scope: Any) -> None:
        for name in builtin_names(namespace):
            member = getattr(namespace, name)
            # One that is patched already is no builtin.
            if tl.core.is_builtin(member):
                interpreter._patch_attr(namespace, name, member, builder, scope)

    monkeypatch.setattr(interpreter, "_patch_builtin", patch_builtins)
