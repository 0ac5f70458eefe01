"""How a layer's weights are kept: as they are, or quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixkv.model.native.panel_cache import PanelCache
from radixkv_cpu import PackedWeight, QuantisedWeight, Weight, is_quantisable


class Quantiser:
    """Quantises weights, or takes them from disk.

    Args:
        quantization: a key of `radixkv_cpu.QUANTIZATIONS`.
        cache: of what was quantised before; None: everything is quantised here.
    """

    def __init__(self, quantization: str, cache: PanelCache | None = None) -> None:
        self.quantization = quantization
        self._cache = cache

    def for_head(self) -> Quantiser:
        """8 bits: each error of the output head is one of a logit."""
        return Quantiser("int8", self._cache)

    def weight(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        activation: str | None,
    ) -> QuantisedWeight:
        """See `QuantisedWeight`."""
        if self._cache is None:
            return QuantisedWeight(weights, self.quantization, biases, activation)
        key = self._cache.key(weights, self.quantization, activation)
        panels = self._cache.read(key)
        made = QuantisedWeight(weights, self.quantization, biases, activation, panels)
        if panels is None and not self._cache.write(key, made.panels):
            self._cache = None
        return made


def make_weight(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    activation: str | None = None,
    quantiser: Quantiser | None = None,
) -> Weight:
    """A `QuantisedWeight` where one is wanted and possible, else a `PackedWeight`.

    Args:
        weights: as both take them.
        biases: as both take them.
        activation: as both take it.
        quantiser: None: weights stay as they are.
    """
    if quantiser is not None and all(is_quantisable(weight) for weight in weights):
        return quantiser.weight(weights, biases, activation)
    return PackedWeight(weights, biases, activation)


def weights_of(model: nn.Module) -> list[Weight]:
    """Those of all modules that compiled code stands in for."""
    return [value for module in model.modules() for value in vars(module).values() if isinstance(value, Weight)]
