"""Sliding windows that a model gives its attention function by the mask alone, as phimoe and qwen2_moe do.

Such masks are made while a model is probed, and only then: what a layer's window is does not change with the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

_WINDOW = "radixkv_window"
# Of the masks that were made in a probe. Each thread has its own.
_windows: ContextVar[set[int | None]] = ContextVar("windows")


@contextmanager
def watch_windows() -> Iterator[None]:
    """Within, the windows of masks are noted, see `is_masked`; only there masks can be made."""
    token = _windows.set(set())
    try:
        yield
    finally:
        _windows.reset(token)


def make_mask(
    *_: Any,
    local_size: int | None = None,
    use_vmap: bool = False,
    dtype: torch.dtype | None = None,
    device: Any = None,
    **__: Any,
) -> torch.Tensor | None:
    """Make the mask for transformers: one that masks nothing, but carries the layer's window; None: it has no window.

    Args:
        local_size: tokens of a sliding window.
        use_vmap: the model combines functions of its own with the causal one. Such a mask is `is_of_model`.
        dtype: of the mask.
        device: of the mask.
    """
    if not (local_size or use_vmap):
        return None
    mask = torch.zeros(1, 1, 1, 1, dtype=dtype, device=device)
    if not use_vmap:
        setattr(mask, _WINDOW, local_size)
        _windows.get().add(local_size)
    return mask


def window_of(sliding_window: int | None, mask: torch.Tensor | None) -> int | None:
    """The window of a layer by what its attention function was given; None: it has none."""
    return sliding_window or getattr(mask, _WINDOW, None)


def is_masked(window: int) -> bool:
    """Whether any mask that was made for the model within `watch_windows` has this window."""
    return window in _windows.get()


def is_of_model(mask: torch.Tensor | None) -> bool:
    """Whether the model's own code made or changed a mask, or had a part in making it."""
    return mask is not None and not hasattr(mask, _WINDOW)
