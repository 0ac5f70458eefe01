"""Which backend is chosen, and what is said where one cannot be."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

from radixkv.attention import BatchLimits
from radixkv.attention.choice import make_backend
from radixkv.attention.native import NativeBackend, backend
from radixkv.attention.torch_cpu import TorchBackend
from radixkv.memory import KVPool, LayerShape
from radixkv_cpu import library


@pytest.fixture
def pool() -> KVPool:
    return KVPool([LayerShape(1, 8, 8)], 2, 16, torch.float32)


@pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")
def test_on_a_cpu_native_code_attends(pool: KVPool) -> None:
    assert isinstance(make_backend("auto", pool, torch.float32, 1, BatchLimits(2, 32)), NativeBackend)


def test_torch_attends_where_native_code_cannot(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(make_backend("auto", pool, torch.float16, 1, BatchLimits(2, 32)), TorchBackend)
    monkeypatch.setattr(backend, "library", lambda: None)
    assert isinstance(make_backend("auto", pool, torch.float32, 1, BatchLimits(2, 32)), TorchBackend)
    with pytest.raises(ValueError, match=r"attention_backend: 'native' needs .* got torch.float32 on cpu"):
        make_backend("native", pool, torch.float32, 1, BatchLimits(2, 32))


def test_an_unknown_backend_is_named(pool: KVPool) -> None:
    with pytest.raises(ValueError, match=r"attention_backend: expected one of .*'triton'\), got 'flash'"):
        make_backend("flash", pool, torch.float32, 1, BatchLimits(2, 32))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter needs no GPU")
def test_triton_without_a_gpu_or_without_triton(pool: KVPool, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'triton' needs a GPU, or TRITON_INTERPRET=1"):
        make_backend("triton", pool, torch.float32, 1, BatchLimits(2, 32))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'triton' needs the package triton"):
        make_backend("triton", pool, torch.float32, 1, BatchLimits(2, 32))
