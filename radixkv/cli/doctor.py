"""What is installed on this machine, and what to do about what is missing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import shutil
import time
from dataclasses import dataclass
from types import MappingProxyType

from rich.console import Console
from rich.table import Table
from rich.text import Text

from radixkv import __version__
from radixkv.cache.counted import counted
from radixkv.errors import ModelLoadError
from radixkv.model.default_model import DEFAULT_MODEL_NAME, find_default_model
from radixkv.model.gguf.conversion import converted_folder, find_damage
from radixkv.model.model_cache import cache_folder, stored_bytes
from radixkv_cpu import VARIANTS, cpu_flags, library

# Instructions that make matrix products faster, by the names that /proc/cpuinfo lists.
_INSTRUCTIONS = MappingProxyType(
    {
        "avx2": "AVX2",
        "avx512f": "AVX-512",
        "avx512_bf16": "AVX512-BF16",
        "amx_bf16": "AMX",
    }
)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``advice`` says what to do where something is missing."""

    what: str
    found: str
    advice: str = ""


def examine() -> list[Finding]:
    """Examine packages, devices and the default model; loads torch, but no model."""
    import torch

    flags = cpu_flags()
    instructions = [name for flag, name in _INSTRUCTIONS.items() if flag in flags]
    num_cores, num_threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    cores = f"{counted(num_cores, 'core')}, {counted(num_threads, 'thread')}"
    is_held = num_threads < num_cores and "OMP_NUM_THREADS" in os.environ
    cores_advice = "unset OMP_NUM_THREADS, unless other programs need the cores" if is_held else ""
    packed = torch.backends.mkldnn.is_available()
    one_dnn_advice = "" if packed else "linear layers run at half speed: use a torch with it"
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return [
        Finding("RadixKV", __version__),
        Finding("Python", platform.python_version()),
        *(Finding(name, importlib.metadata.version(name)) for name in ("torch", "transformers", "numpy", "tokenizers")),
        Finding("CPU", ", ".join([cores, *instructions]), cores_advice),
        Finding("memory", f"read at {_read_bandwidth() / 1e9:.0f} GB/s"),
        _native_code(flags),
        Finding("oneDNN", "yes" if packed else "no", one_dnn_advice),
        _triton(),
        Finding("CUDA devices", ", ".join(devices) or "none", "" if devices else "running on the CPU"),
        _default_model(),
        _model_cache(),
    ]


def _native_code(flags: frozenset[str]) -> Finding:
    """What `radixkv_cpu` runs on a processor with these flags."""
    try:
        native = library()
    except (OSError, ValueError, RuntimeError) as error:
        return Finding("native code", "cannot be used", str(error))
    if native is not None:
        dtype, converted = ("bfloat16", "") if native.is_fast_in_bf16 else ("float32", "bfloat16, ")
        return Finding("native code", f"{native.variant}, {dtype} ({converted}int8 and int4 are converted to it)")
    if os.environ.get("RADIXKV_CPU_VARIANT") == "none":
        advice = "unset RADIXKV_CPU_VARIANT, which is none"
    elif not any(needed <= flags for needed in VARIANTS.values()):
        advice = "it is for x86-64 with AVX2 or later"
    else:
        advice = "install g++, then reinstall RadixKV"
    return Finding("native code", "none", f"torch computes instead, at half the speed: {advice}")


def _read_bandwidth() -> float:
    """Bytes per second that all threads read from memory: what a decoding step is bound by."""
    import torch

    numbers = torch.ones(2**26, dtype=torch.float32)
    seconds = []
    for _ in range(3):
        start = time.perf_counter()
        numbers.sum()
        seconds.append(time.perf_counter() - start)
    return numbers.nbytes / min(seconds)


def report(console: Console) -> None:
    """Print the findings."""
    table = Table(box=None, pad_edge=False)
    for title in ("", "found", "what to do"):
        table.add_column(title, overflow="fold")
    for finding in examine():
        table.add_row(Text(finding.what), Text(finding.found), Text(finding.advice))
    console.print(table)


def _triton() -> Finding:
    if not importlib.util.find_spec("triton"):
        return Finding("Triton", "not installed", "only needed on a GPU")
    import triton

    return Finding("Triton", triton.__version__)  # its package may have another name


def _model_cache() -> Finding:
    folder = cache_folder()
    # Unlike `Path.exists`, it is False where this user may not look.
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    advice = "" if os.access(existing, os.W_OK) else "it cannot be written: set RADIXKV_CACHE to another folder"
    used, free = stored_bytes() / 2**30, shutil.disk_usage(existing).free / 2**30
    return Finding("model cache", f"{folder}, {used:.1f} GiB used, {free:.0f} GiB free", advice)


def _default_model() -> Finding:
    try:
        gguf = find_default_model()
    except ModelLoadError as error:
        return Finding(DEFAULT_MODEL_NAME, "not installed", str(error).split(": ", 1)[1])
    folder = converted_folder(gguf)
    if not os.path.exists(folder):
        return Finding(DEFAULT_MODEL_NAME, "installed, not converted yet", "radixkv doctor --prepare")
    damage = find_damage(folder)
    return Finding(DEFAULT_MODEL_NAME, damage or "ready", "it is converted again when it is used" if damage else "")
