"""Each compiled variant of `radixkv_cpu` that this processor runs, one after another in one process."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from radixkv_cpu import supported_variants

# The package's attribute of this name is the function.
_module = importlib.import_module("radixkv_cpu.library")

VARIANTS = [name for name in supported_variants() if _module.load(name) is not None]
each_variant = pytest.mark.parametrize("variant", VARIANTS)


@contextmanager
def use(variant: str, num_threads: int = 1) -> Iterator[None]:
    """Within, `radixkv_cpu` is this variant on so many threads, and new tensors begin as NaN, so that gaps are seen."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_module, "library", lambda: _module.load(variant))
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
