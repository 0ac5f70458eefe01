"""The compiled library: which of its variants this processor runs, loaded once."""

from __future__ import annotations

import ctypes
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import cast

import torch

from radixkv_cpu.source_digest import source_digest

FOLDER = Path(__file__).parent
# What compilers may use for x86-64-v3 and x86-64-v4.
_V3 = frozenset({"abm", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"})
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VARIANTS: Mapping[str, frozenset[str]] = MappingProxyType(
    {
        "amx": _V4 | {"amx_bf16", "amx_tile", "avx512_bf16", "avx512_fp16", "avx512vbmi"},
        "avx512_bf16": _V4 | {"avx512_bf16"},
        "avx512": _V4,
        "avx2": _V3,
    }
)
"""Variants of the native code, the best first, with what /proc/cpuinfo must list for each."""


class Library:
    """One variant.

    Args:
        variant: a key of `VARIANTS`.
        path: of the file.

    Raises:
        RuntimeError: it was not compiled from the sources beside this file, so arguments and results may differ.
    """

    def __init__(self, variant: str, path: Path) -> None:
        self.variant = variant
        self._dll = ctypes.CDLL(str(path))
        compiled, expected = self._compiled_sources(), source_digest(FOLDER / "src")
        if compiled != expected:
            raise RuntimeError(
                f"{path}: expected a library compiled from the sources {expected} in {FOLDER / 'src'}, got one of "
                f"{compiled}: compile it again (pip install -e . in a checkout), or do without (RADIXKV_CPU_VARIANT=none)"
            )
        # Each takes the address of its arguments and a flag, mostly whether numbers are in bfloat16: see calls.h.
        self.linear = self._function("linear")
        self.features = self._function("features")
        self.attention = self._function("attention")
        self.rms_norm = self._function("rms_norm")
        self.rope = self._function("rope")
        self.write = self._function("write")
        self.experts = self._function("experts")
        self.layers = self._function("layers")
        self.rows = self._function("rows")
        self.records = self._function("records")
        self.draw = self._function("draw")
        self.logprobs = self._function("logprobs")

    def _function(self, name: str) -> Callable[[int, bool], None]:
        function = getattr(self._dll, f"radixkv_{name}")
        function.argtypes, function.restype = [ctypes.c_void_p, ctypes.c_int32], None
        return cast(Callable[[int, bool], None], function)

    def _compiled_sources(self) -> str:
        """The `source_digest` of the sources that it was compiled from."""
        name = getattr(self._dll, "radixkv_sources", None)
        if name is None:
            return "others, which it does not name"
        name.argtypes, name.restype = [], ctypes.c_char_p
        return cast(bytes, name()).decode()

    @property
    def is_fast_in_bf16(self) -> bool:
        """Whether the processor multiplies bfloat16 itself: other variants convert every number to float32 first."""
        return "avx512_bf16" in VARIANTS[self.variant]

    def is_permitted(self) -> bool:
        """Whether the operating system lets this process use the variant's instructions."""
        return bool(self._dll.radixkv_prepare())


def supported_variants() -> list[str]:
    """The variants that this processor can run and that were compiled, the best first."""
    flags = cpu_flags()
    return [name for name, needed in VARIANTS.items() if needed <= flags and _path(name).exists()]


@functools.cache
def load(variant: str) -> Library | None:
    """One of `supported_variants`; None: torch has no OpenMP runtime to share, or the system forbids the instructions.

    Raises:
        RuntimeError: it was compiled from other sources; see `Library`.
    """
    if not _share_openmp():
        return None
    loaded = Library(variant, _path(variant))
    return loaded if loaded.is_permitted() else None


@functools.cache
def library() -> Library | None:
    """The best variant for this processor, or the one that ``RADIXKV_CPU_VARIANT`` names; None: none, or ``none`` is named.

    Raises:
        ValueError: the environment names a variant that cannot run here.
        RuntimeError: it was compiled from other sources; see `Library`.
    """
    supported = supported_variants()
    named = os.environ.get("RADIXKV_CPU_VARIANT")
    if named == "none":
        return None
    found = next(filter(None, map(load, supported if named is None else {named} & {*supported})), None)
    if named is not None and found is None:
        raise ValueError(f"RADIXKV_CPU_VARIANT: expected 'none' or one of {supported} that loads, got {named!r}")
    return found


def require_library() -> Library:
    """`library`, where there must be one.

    Raises:
        RuntimeError: none of the variants was compiled, or this processor runs none of them.
    """
    found = library()
    if found is None:
        raise RuntimeError(f"radixkv_cpu: this processor runs none of the compiled variants ({', '.join(VARIANTS)})")
    return found


def _path(variant: str) -> Path:
    return FOLDER / f"libradixkv_cpu_{variant}.so"


def cpu_flags() -> frozenset[str]:
    """What the processor offers, by the names that /proc/cpuinfo lists; nothing where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return frozenset()
    return frozenset(next((line.split(":", 1)[1] for line in lines if line.startswith("flags")), "").split())


class _Symbol(ctypes.Structure):
    """`Dl_info` of ``dlfcn.h``: what is at an address, and in which file."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def openmp_of_torch() -> str | None:
    """The file of the OpenMP runtime that torch uses, whatever copies other packages have loaded; None: it uses none."""
    # A function is also looked for in the libraries that this one is linked to.
    function = getattr(ctypes.CDLL(torch._C.__file__), "omp_get_max_threads", None)
    if function is None:
        return None
    symbol = _Symbol()
    ctypes.CDLL(None).dladdr(function, ctypes.byref(symbol))
    return os.fsdecode(symbol.file)


def _share_openmp() -> bool:
    """Let the library's calls of OpenMP resolve to torch's runtime; False: torch has none.

    The library is linked to no runtime: a second one would have threads of its own, which spin while torch's want to run.
    """
    runtime = openmp_of_torch()
    if runtime is None:
        warnings.warn(f"torch {torch.__version__} has no OpenMP runtime that can be shared", stacklevel=2)
        return False
    ctypes.CDLL(runtime, mode=ctypes.RTLD_GLOBAL)
    return True
