"""Errors that are raised where memory is lacking."""

from __future__ import annotations

import torch

_OF_CPU = "DefaultCPUAllocator: can't allocate memory"


def is_out_of_memory(error: Exception) -> bool:
    """Whether this was raised for lack of memory: for a CPU's, torch has no error class of its own."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _OF_CPU in str(error)
