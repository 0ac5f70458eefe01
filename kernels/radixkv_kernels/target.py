"""What kernels are compiled for: a GPU's architecture and shared memory, or the interpreter."""

from __future__ import annotations

import functools
from types import MappingProxyType
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

_TYPES = MappingProxyType({torch.float16: tl.float16, torch.bfloat16: tl.bfloat16})

COMPILE_OPTIONS = MappingProxyType({"enable_fp_fusion": True})
"""For every launch: a multiplication and an addition become one instruction, rounded once. Set explicitly, because Triton's
default changes from 3.10 on."""


class Target(NamedTuple):
    """The properties of a GPU that decide how its kernels are cut.

    Attributes:
        architecture: 80 for sm_80 and so on.
        shared_memory: bytes of it that a program may have, if it requests more than the 48 KiB that all have.
    """

    architecture: int
    shared_memory: int

    @property
    def has_warp_groups(self) -> bool:
        """Whether four warps multiply together, operands in shared memory: sm_90's wgmma, sm_100's tcgen05.

        Before, and again on consumer GPUs from sm_120 on, each warp multiplies what lies in its registers.
        """
        return 90 <= self.architecture < 120


# Decides how kernels are cut in the interpreter.
_INTERPRETED = Target(90, 227 * 1024)


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter rather than on a GPU."""
    return bool(triton.knobs.runtime.interpret)


def compute_type(query_dtype: torch.dtype, cache_dtype: torch.dtype) -> tl.dtype:
    """The type that attention multiplies in: float32 in the interpreter, whose bfloat16 is wrong; on a GPU the query's type.

    Or float16 for a float8 cache: one instruction converts two numbers to it, to bfloat16 there is none. It holds every
    float8 number, and weights, which are at most 1, in more bits.
    """
    if interpreted() or query_dtype == torch.float32:
        return tl.float32
    return tl.float16 if cache_dtype == torch.float8_e4m3fn else _TYPES[query_dtype]


def current_target() -> Target:
    """The target of the current device; the interpreter is treated like sm_90."""
    return _INTERPRETED if interpreted() else _target_of(driver.active.get_current_device())


@functools.cache
def _target_of(device: int) -> Target:
    # The limit that Triton itself checks when it loads a kernel.
    shared_memory = driver.active.utils.get_device_properties(device)["max_shared_mem"]
    return Target(int(driver.active.get_current_target().arch), shared_memory)
