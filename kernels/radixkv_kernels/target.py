"""What kernels are compiled for: a GPU's architecture, or the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter rather than on a GPU."""
    return bool(triton.knobs.runtime.interpret)


def compute_type(dtype: torch.dtype) -> tl.dtype:
    """The query's type on a GPU; float32 in the interpreter, whose bfloat16 arithmetic is wrong."""
    return tl.float32 if interpreted() else _TYPES[dtype]


def architecture() -> int:
    """80 for sm_80 and so on; the interpreter is treated like sm_90."""
    return 90 if interpreted() else int(triton.runtime.driver.active.get_current_target().arch)
