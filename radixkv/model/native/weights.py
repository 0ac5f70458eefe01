"""How a layer's weights are kept: as they are, or quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixkv_cpu import PackedWeight, QuantisedWeight, Weight, is_quantisable


def make_weight(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    activation: str | None = None,
    quantization: str | None = None,
) -> Weight:
    """A `QuantisedWeight` where one is wanted and possible, else a `PackedWeight`.

    Args:
        weights, biases, activation: as both take them.
        quantization: a key of `radixkv_cpu.QUANTIZATIONS`; None: weights stay as they are.
    """
    if quantization is not None and all(is_quantisable(weight) for weight in weights):
        return QuantisedWeight(weights, quantization, biases, activation)
    return PackedWeight(weights, biases, activation)


def weights_of(model: nn.Module) -> list[Weight]:
    """Those of all modules that compiled code stands in for."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Weight)]
