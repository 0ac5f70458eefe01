"""Kernels compiled for NVIDIA architectures on a machine without a GPU: what the compiler made of them."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton.backends.nvidia
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

# Bytes that a program may have (CUDA C programming guide, compute capabilities).
SHARED_MEMORY = {arch: kib * 1024 for arch, kib in {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}.items()}
_TOOLS = Path(triton.backends.nvidia.__file__).parent / "bin"


@dataclass(frozen=True)
class Compiled:
    """One kernel's machine code.

    Attributes:
        spills: loads and stores of registers that did not fit.
        spills_in_loops: those that are paid for again and again.
        under_way: of each loop, how many groups of copies into shared memory a turn begins without waiting for.
        fp_fusion: whether a product and the sum that it goes into may become one instruction.
        operations: PTX instructions, by the first two parts of their names.
        byte_reads: loads of a single byte from shared memory.
        multiplied: element types of the matrices that are multiplied, where an instruction's name tells.
    """

    shared: int
    registers: int
    spills: int
    spills_in_loops: int
    under_way: list[int]
    fp_fusion: bool
    operations: set[str]
    byte_reads: int
    multiplied: set[str]


class NoGpu(DriverBase):  # type: ignore[misc]
    """As much of a driver as compiling needs."""

    def __init__(self, arch: int) -> None:
        self._arch = arch

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        return "int"

    @property
    def utils(self) -> Any:
        properties = {"max_shared_mem": SHARED_MEMORY[self._arch]}
        return SimpleNamespace(get_device_properties=lambda device: properties)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_current_device(self) -> int:
        return self._arch  # compiled kernels are kept by device: each architecture needs its own

    def set_current_device(self, device: int) -> None: ...

    def get_current_stream(self, device: int | None = None) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_device_interface(self) -> Any:
        return torch.cpu

    def get_benchmarker(self) -> Callable[..., float]:
        raise NotImplementedError

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        raise NotImplementedError

    def clear_cache(self, cache: torch.Tensor) -> None:
        raise NotImplementedError


@contextmanager
def pretended_gpu(run: Callable[..., Any], arch: int = 90) -> Iterator[None]:
    """Inside, Triton finds a GPU of this architecture, and launches call ``run``, as `JITFunction.run` is called."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr(driver, "_active", NoGpu(arch))
        yield


@contextmanager
def compile_only(arch: int) -> Iterator[list[Compiled]]:
    """Inside, launches compile for ``arch`` and run nothing; yields the list of what was compiled."""
    compiled: list[Compiled] = []
    run = JITFunction.run

    def compile_instead(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        kernel = run(self, *args, warmup=True, **kwargs)
        compiled.append(_examine(kernel))
        return kernel

    with pretended_gpu(compile_instead, arch):
        yield compiled


@contextmanager
def grids_only() -> Iterator[list[tuple[int, ...]]]:
    """Inside, launches compile and run nothing; yields the list of their grids."""
    grids: list[tuple[int, ...]] = []
    with pretended_gpu(lambda self, *args, grid, warmup, **kwargs: grids.append(grid)):
        yield grids


def _examine(kernel: Any) -> Compiled:
    usage = _dump("--dump-resource-usage", kernel)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found
    registers, stack = map(int, found.groups())
    # Disassembling takes longer than most passes of the compiler. What spills, spills onto the stack.
    spills, in_loops = _count_spills(_dump("--dump-sass", kernel)) if stack else (0, 0)
    loops = kernel.asm["ttgir"].split("scf.for")[1:]
    return Compiled(
        kernel.metadata.shared,
        registers,
        spills,
        in_loops,
        [int(wait[1]) for loop in loops if (wait := re.search(r"async_wait .*num = (\d+)", loop))],
        kernel.metadata.enable_fp_fusion,
        set(re.findall(r"^\s+(?:@!?%\w+\s+)?([a-z0-9_]+\.[a-z0-9_]+)", kernel.asm["ptx"], re.MULTILINE)),
        len(re.findall(r"ld\.shared\S*[bu]8\s", kernel.asm["ptx"])),
        set(re.findall(r"mma\S*\.([a-z0-9]+)\.\1", kernel.asm["ptx"])),
    )


def _dump(what: str, kernel: Any) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run(
            [_TOOLS / "cuobjdump", what, file.name], capture_output=True, text=True, check=True
        ).stdout


def _count_spills(sass: str) -> tuple[int, int]:
    """All loads and stores of registers that did not fit, and those in loops."""
    instructions = re.findall(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@!?\w+ )?([A-Z0-9]+)(.*)", sass, re.MULTILINE)
    spills = [int(address, 16) for address, operation, _ in instructions if operation in ("LDL", "STL")]
    # A loop goes from where a branch goes back to, to that branch.
    jumps = [
        (int(target[1], 16), int(address, 16))
        for address, operation, rest in instructions
        if operation == "BRA" and (target := re.search(r"0x([0-9a-f]+)", rest))
    ]
    return len(spills), sum(any(start <= address <= end for start, end in jumps) for address in spills)
