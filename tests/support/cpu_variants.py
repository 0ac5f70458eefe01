"""Each compiled variant of `radixkv_cpu` that this processor runs, one after another in one process.

The variant with AMX tiles runs everywhere where those with AVX512-BF16 do: without such tiles, it is compiled with
`amx_in_software.h`.
"""

from __future__ import annotations

import functools
import importlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from filelock import FileLock

from radixkv_cpu import supported_variants
from radixkv_cpu.source_digest import source_digest

# The package's attribute of this name is the function.
_module = importlib.import_module("radixkv_cpu.library")
_SOURCES = Path(_module.__file__ or "").parent / "src"
_AMX_HEADER = Path(__file__).with_name("amx_in_software.h")
# AVX512-BF16 and what else processors with AMX have, which the variant may be compiled for.
_SOFTWARE_FLAGS = ["-march=x86-64-v4", "-mavx512bf16", "-mavx512vbmi"]


def _amx_needs_software() -> bool:
    flags = _module.cpu_flags()
    needed = _module.VARIANTS["avx512_bf16"] | {"avx512vbmi"}
    return needed <= flags and not _module.VARIANTS["amx"] <= flags and shutil.which("g++") is not None


@functools.cache
def _amx_in_software() -> object:
    """The library, compiled once for all processes that run tests."""
    sources = source_digest(_SOURCES)
    name = f"radixkv-{os.getuid()}-amx-in-software-{sources}-{source_digest(_AMX_HEADER.parent)}.so"
    path = Path(tempfile.gettempdir(), name)
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            with tempfile.TemporaryDirectory() as folder:
                compile_all: list[str | Path] = [
                    "g++", "-c", "-fPIC", "-std=c++17", "-O2", "-fopenmp", "-fno-math-errno", "-fno-trapping-math", "-w",
                    *_SOFTWARE_FLAGS, "-include", _AMX_HEADER, f'-DRADIXKV_SOURCES="{sources}"',
                    *_SOURCES.glob("*.cpp"),
                ]  # fmt: skip
                subprocess.run(compile_all, check=True, cwd=folder)
                # Without -fopenmp, as in setup.py.
                linked = Path(folder, "linked.so")
                subprocess.run(["g++", "-shared", *Path(folder).glob("*.o"), "-o", linked], check=True)
                shutil.move(linked, path)
    library = _module.Library("amx", path)
    assert library.is_permitted()
    return library


def _load(variant: str) -> object:
    return _amx_in_software() if variant == "amx" and _amx_needs_software() else _module.load(variant)


VARIANTS = ["amx"] * _amx_needs_software() + [name for name in supported_variants() if _module.load(name) is not None]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@contextmanager
def use(variant: str, num_threads: int = 1) -> Iterator[None]:
    """Within, `radixkv_cpu` is this variant on so many threads, and new tensors begin as NaN, so that gaps are seen."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_module, "library", lambda: _load(variant))
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(True)  # with which torch fills memory that nothing was written to
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(deterministic)
            torch.set_num_threads(threads)


def guarded(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A copy of ``x`` within a larger tensor of NaN; and that tensor, of which nothing but the copy may change."""
    around = torch.full((x.numel() + 128,), float("nan"), dtype=x.dtype)
    inside = around[64:-64].view(x.shape)
    inside.copy_(x)
    return inside, around


def is_untouched(around: torch.Tensor) -> bool:
    return bool(around[:64].isnan().all() and around[-64:].isnan().all())


def assert_close(given: torch.Tensor, expected: torch.Tensor, magnitude: torch.Tensor) -> None:
    """Within a few roundings of sums in float32 of numbers of ``magnitude`` together, and one of the result.

    bfloat16 has 8 bits: rounding to nearest is wrong by 2^-8 at most.
    """
    rounding = 2.0**-7.99 if given.dtype == torch.bfloat16 else 1e-6
    bound = 3e-6 * magnitude + rounding * expected.abs() + 1e-37
    assert given.shape == expected.shape
    worst = ((given.double() - expected).abs() - bound).max()
    assert worst <= 0, f"{worst} beyond the bound"
