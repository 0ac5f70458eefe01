"""What the tests of benchmarks can omit, because they do not look at how long anything takes."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from support.preloaded_process import COMMAND_LINE, PreloadedProcess

from radixkv.bench.cache import bookkeeping, scaling
from radixkv.bench.gpu import plan
from radixkv.bench.serving import server_process


@pytest.fixture(autouse=True)
def uncollected_garbage(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collection before every figure takes longer than the figure, with all objects that earlier tests left."""
    monkeypatch.setattr(gc, "collect", lambda generation=2: 0)
    for module in (bookkeeping, plan, scaling):
        monkeypatch.setattr(module, "frozen_garbage", contextlib.nullcontext)


@pytest.fixture
def preloaded_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes that a benchmark measures start with RadixKV imported."""

    def popen(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> PreloadedProcess:
        with patch.dict(os.environ, env, clear=True):
            return PreloadedProcess(COMMAND_LINE, *command[command.index("radixkv") + 1 :])

    monkeypatch.setattr(server_process, "subprocess", SimpleNamespace(Popen=popen, PIPE=subprocess.PIPE))
