"""Uploads from the host to the device that do not wait for the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor on the device, without waiting for anything that runs there.

    It goes through pinned memory, which torch reuses once it has been read: with other memory, the driver may wait for all
    that was launched before. On a CPU, the result is the tensor itself.
    """
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def upload_into(buffer: torch.Tensor, array: NDArray[np.int32]) -> None:
    """Copy the array to the beginning of a buffer on the device, without waiting, as `to_device` says."""
    tensor = torch.from_numpy(array)
    source = tensor.pin_memory() if buffer.is_cuda else tensor
    buffer[: len(array)].copy_(source, non_blocking=True)


def upload(arrays: Sequence[NDArray[np.int32]], device: torch.device) -> list[torch.Tensor]:
    """The arrays on the device, in one copy."""
    *starts, total = aligned_starts(array.size for array in arrays)
    packed = np.zeros(total, dtype=np.int32)
    for start, array in zip(starts, arrays, strict=True):
        packed[start : start + array.size] = array.reshape(-1)
    on_device = to_device(torch.from_numpy(packed), device)
    parts = [on_device[start : start + array.size] for start, array in zip(starts, arrays, strict=True)]
    return [part if array.ndim == 1 else part.view(array.shape) for part, array in zip(parts, arrays, strict=True)]


def aligned_starts(sizes: Iterable[int]) -> list[int]:
    """Where parts of these numbers of int32 begin in one buffer; last, the buffer's size.

    Each part is aligned to 16 bytes: for one that is not, kernels would be compiled again.
    """
    return list(itertools.accumulate((-(-size // 4) * 4 for size in sizes), initial=0))
