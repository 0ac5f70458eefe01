"""How a layer's weights are kept: as they are, or quantised."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from radixkv.model.native.panel_cache import PanelCache
from radixkv.model.weights.deferred import DeferredWeights
from radixkv_cpu import BlockWeight, PackedWeight, QuantisedWeight, Weight, is_quantisable


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
        """One of 8 bits, because an error in the output head is an error of a logit."""
        return Quantiser("int8", self._cache)

    def weight(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        activation: str | None,
    ) -> Weight | None:
        """See `QuantisedWeight`; None: these cannot be quantised."""
        if not all(is_quantisable(weight) for weight in weights):
            return None
        if self._cache is None:
            return QuantisedWeight(weights, self.quantization, biases, activation)
        key = self._cache.key(weights, self.quantization, activation)
        panels = self._cache.read(key)
        made = QuantisedWeight(weights, self.quantization, biases, activation, panels)
        if panels is None:
            self._cache.write(key, made.panels)
        return made


class BlockKeeper:
    """Keeps weights as the blocks that their file holds.

    Args:
        weights: the model's.
    """

    def __init__(self, weights: DeferredWeights) -> None:
        self._weights = weights

    def for_head(self) -> BlockKeeper:
        """The file says how the output head is quantised."""
        return self

    def weight(
        self,
        weights: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor | None],
        activation: str | None,
    ) -> Weight | None:
        """See `BlockWeight`; None: not all of these are blocks that can be kept, together."""
        blocks = [self._weights.blocks(weight) for weight in weights]
        kept = [part for part in blocks if part is not None]
        if len(kept) < len(blocks) or len({part.integers.dtype for part in kept}) > 1:
            return None
        return BlockWeight(kept, weights[0].dtype, biases, activation)


WeightKeeper = Quantiser | BlockKeeper
"""How the weights of replaced modules are kept, where not as they are."""


def make_weight(
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] = (),
    activation: str | None = None,
    keeper: WeightKeeper | None = None,
) -> Weight:
    """The weight as the keeper keeps it, if there is one and it can; otherwise a `PackedWeight`."""
    made = None if keeper is None else keeper.weight(weights, biases, activation)
    return PackedWeight(weights, biases, activation) if made is None else made


def weights_of(model: nn.Module) -> list[Weight]:
    """The weights of all replaced modules, each once."""
    found = (value for module in model.modules() for value in vars(module).values() if isinstance(value, Weight))
    return [*dict.fromkeys(found)]
