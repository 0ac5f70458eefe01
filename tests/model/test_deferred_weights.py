"""Weights that are not in memory yet."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from radixkv.model.deferred_weights import ProductsOfZeros


def placeholder(features: int, inputs: int, bias: torch.Tensor | None) -> nn.Linear:
    """As a model has it whose weights are in files."""
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(torch.zeros(()).expand(features, inputs), requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear


def test_zeros_that_stand_for_weights_are_never_written() -> None:
    """These would take four terabytes."""
    size = 1 << 20
    with ProductsOfZeros():
        product = placeholder(size, size, None)(torch.ones(2, size))
    assert product.shape == (2, size)
    assert not product.any()


@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_results_are_those_of_multiplying(bias: torch.Tensor | None) -> None:
    zeros, weights = placeholder(5, 3, bias), nn.Linear(3, 5)
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    with ProductsOfZeros():
        given = zeros(x), weights(x)
    assert torch.equal(given[0], zeros(x))
    assert torch.equal(given[1], weights(x))
