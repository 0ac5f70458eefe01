"""What is found out about a module and what could stand in for it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from radixkv.model.replacement.equivalence import error_in_tolerances
from radixkv.model.replacement.probe import Probe


class _Attending(nn.Module):
    """Returns its input, and attends with that input times a factor."""

    def __init__(self, probe: Probe, factor: float) -> None:
        super().__init__()
        self._probe, self._factor = probe, factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._probe.attended.append(self._factor * x.unsqueeze(1))
        return x


@pytest.mark.parametrize(
    ("factor", "original", "error"),
    [(1.0, 1.0, 0.0), (0.0, 0.0, 0.0), (math.nan, 1.0, math.inf), (math.inf, math.inf, math.inf)],
)
def test_queries_that_compare_with_nothing_are_no_equal_ones(factor: float, original: float, error: float) -> None:
    """An error that is no number was the greatest of none, and so the module was replaced."""
    probe = Probe()
    replaced = _Attending(probe, original)
    probe.calls[replaced] = (torch.ones(1, 5, 8),), {}
    assert error_in_tolerances(_Attending(probe, factor), replaced, probe) == error


class _Halves(nn.Module):
    """Sums of pairs of numbers, times a factor, in a type of its own."""

    def __init__(self, factor: float, dtype: torch.dtype) -> None:
        super().__init__()
        self._factor, self._dtype = factor, dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.float().unflatten(-1, (-1, 2)).sum(-1) * self._factor).to(self._dtype)


@pytest.mark.parametrize(
    ("factor", "dtype", "fits"),
    [(1.0, torch.bfloat16, True), (1.02, torch.bfloat16, False), (1.0, torch.float32, False)],
)
def test_results_of_another_size_or_type_are_no_equal_ones(factor: float, dtype: torch.dtype, fits: bool) -> None:
    """Rounding to bfloat16 may hide either. Like a projection's, these results have not the input's shape."""
    original, probe = _Halves(1.0, dtype), Probe()
    probe.calls[original] = (torch.ones(1, 5, 256, dtype=torch.bfloat16),), {}
    assert (error_in_tolerances(_Halves(factor, torch.bfloat16), original, probe) <= 1) is fits
