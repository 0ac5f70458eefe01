"""A serving process caches few oneDNN primitives, however many shapes its steps have."""

from __future__ import annotations

import ctypes

import pytest
from support.preloaded_process import run_preloaded

from radixkv.model.onednn_cache import limit_primitive_cache

# glibc counts what is allocated and not freed; unlike resident memory it does not depend on holes in the heap.
_PROGRAM = """
import ctypes
import os

import torch
from torch import nn

from radixkv.model.replacement.packed_linear import pack_linears
from radixkv.model.onednn_cache import limit_primitive_cache

NAMES = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"


class Mallinfo2(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in NAMES.split()]


limit_primitive_cache(os.environ)
libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Mallinfo2
model = nn.Sequential(nn.Linear(64, 128, bias=False))
x = torch.zeros(901, 64)
num_packed = pack_linears(model, lambda: model(x[:1]))
with torch.inference_mode():
    for num_rows in range(1, 301):
        model(x[:num_rows])
    before = libc.mallinfo2().uordblks
    for num_rows in range(301, 901):
        model(x[:num_rows])
print(num_packed, libc.mallinfo2().uordblks - before)
"""


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment gives no capacity."""
    for name in ("LRU_CACHE_CAPACITY", "ONEDNN_PRIMITIVE_CACHE_CAPACITY"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unlimited")
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="needs glibc's mallinfo2")
def test_memory_does_not_grow_with_the_number_of_shapes() -> None:
    run = run_preloaded(_PROGRAM)
    assert run.returncode == 0, run.stderr
    num_packed, grown_bytes = map(int, run.stdout.split())
    if num_packed == 0:
        pytest.skip("no oneDNN for this processor")
    # Without either of the two limits it is 110 MB and more.
    assert grown_bytes < 10 << 20


def test_a_capacity_in_the_environment_is_kept() -> None:
    environment = {"LRU_CACHE_CAPACITY": "7"}
    limit_primitive_cache(environment)
    assert environment == {"LRU_CACHE_CAPACITY": "7", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}


@pytest.mark.usefixtures("unlimited")
def test_a_server_limits_the_primitive_cache() -> None:
    program = """
import os
import radixkv.server.run
from radixkv.cli.main import main

radixkv.server.run.run_server = lambda *arguments: print(os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"])
main()
"""
    assert run_preloaded(program, "serve").stdout == "256\n"
