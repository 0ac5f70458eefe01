"""Linear layers whose weights are integers of 8 or 4 bits, with numbers of their own for every 32 inputs of a feature.

Only weights are quantised. A product multiplies the inputs by what the integers stand for: by `dequantise` in the inputs'
type, or unrounded where ``src/factored.h`` says so. So the error does not depend on how many rows a product has.
``src/quantised.h`` describes the layout in memory: 8.5 or 5 bits per weight.

With 4 bits, a group has a centre beside its scale. The perplexity of a text under SmolLM2-135M-Instruct is 13.12 with the
original weights, 13.10 with centres, and 16.27 with scales alone, 4.5 bits per weight. (That model's weights come from a file
with such groups. Normally distributed weights lose 7.6 % of their norm with centres, 8.2 % without.)
"""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.formats import FEATURES_AT_ONCE, GROUP, Format, write_panels
from radixkv_cpu.linear import PANEL, Weight, check_weights, is_packable, stack

QUANTIZATIONS = MappingProxyType(
    {
        "int8": Format(1, 8, torch.bfloat16),
        "int4": Format(2, 4, torch.bfloat16, is_centred=True, lowest=-8),
    }
)
"""How weights are kept, by name."""

# Scales tried with 4 bits, as fractions of that at which integers reach from the smallest weight to the largest.
_CANDIDATES = (1.0, 0.95, 0.9, 0.85)


class Quantised(NamedTuple):
    """Integers and what they stand for: ``integers * scales``, with 4 bits ``+ centres``.

    Attributes:
        integers: int8 ``[features, inputs]``.
        scales: bfloat16 ``[features, inputs / 32]``.
        centres: of the same shape and type; None with 8 bits.
    """

    integers: torch.Tensor
    scales: torch.Tensor
    centres: torch.Tensor | None


class QuantisedWeight(Weight):
    """Weights as integers, in the order in which products read them; otherwise like `PackedWeight`.

    Args:
        weights: of one type, float32 or bfloat16, which inputs and products have, too; and of one number of inputs, a
            multiple of 32.
        quantization: a key of `QUANTIZATIONS`.
        biases: one per weight, or None.
        activation: a key of `ACTIVATIONS`, as of `PackedWeight`.
        panels: those of another object that was made of the same weights; None: the weights are quantised here.

    Raises:
        ValueError: a weight is not `is_quantisable` or not finite; or the weights, their biases and the activation do not
            belong together.
    """

    def __init__(
        self,
        weights: Sequence[torch.Tensor],
        quantization: str,
        biases: Sequence[torch.Tensor | None] = (),
        activation: str | None = None,
        panels: torch.Tensor | None = None,
    ) -> None:
        check_weights(weights, biases, activation)
        _check_quantization(quantization)
        _check_inputs(weights[0])
        if panels is None:
            panels = _quantised_panels(stack(weights, activation), quantization)
        else:
            features, inputs = sum(len(weight) for weight in weights), weights[0].shape[1]
            count = 2 if activation else 1
            expected = QUANTIZATIONS[quantization].panel_shape(count, features // count, inputs)
            check_tensor("panels", panels, expected, [torch.uint8])
        super().__init__(panels, weights, biases, activation, QUANTIZATIONS[quantization].number, quantization)


def is_quantisable(weight: torch.Tensor) -> bool:
    """Whether products with this weight, ``[features, inputs]``, can be computed here with integers in its place."""
    return is_packable(weight) and weight.shape[1] % GROUP == 0


def quantise(weight: torch.Tensor, quantization: str) -> Quantised:
    """The nearest integers to a weight, and their scales and centres.

    With 8 bits, a scale takes the largest weight of its group to 127. With 4 bits, a group's integers reach from its smallest
    weight to its largest, or to somewhat less far if that lessens the squared error.

    Args:
        weight: ``[features, inputs]``, floats; inputs are a multiple of 32.
        quantization: a key of `QUANTIZATIONS`.

    Raises:
        ValueError: another shape or key, or not all numbers are finite.
    """
    _check_quantization(quantization)
    _check_inputs(weight)
    function = _to_8_bits if quantization == "int8" else _to_4_bits
    parts = [function(part.detach().float().unflatten(-1, (-1, GROUP))) for part in weight.split(FEATURES_AT_ONCE)]
    integers, scales, *centres = (torch.cat(kind) for kind in zip(*parts, strict=True))
    return Quantised(integers.to(torch.int8).flatten(-2), scales, centres[0] if centres else None)


def dequantise(quantised: Quantised, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """The weights that integers stand for: ``[features, inputs]`` in float32, or rounded as products in bfloat16 do it."""
    integers, scales, centres = quantised
    weight = integers.unflatten(-1, (-1, GROUP)) * scales.float().unsqueeze(-1)
    if centres is not None:
        weight += centres.float().unsqueeze(-1)
    if dtype == torch.bfloat16:
        # Ties away from zero.
        weight = ((weight.view(torch.int32) + 0x8000) & ~0xFFFF).view(torch.float32)
    result: torch.Tensor = weight.flatten(-2).to(dtype)
    return result


def _to_8_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integers as floats ``[features, groups, 32]``, and scales ``[features, groups]``."""
    lowest, highest = _range(groups)
    # Rounded up to bfloat16, so that the largest weight is within 127 of them.
    scales = torch.maximum(-lowest, highest) / 127
    scales = ((scales.view(torch.int32) + 0xFFFF) & ~0xFFFF).view(torch.float32)
    integers = (groups / _not_zero(scales)).round_().clamp_(-127, 127)
    return integers, scales.squeeze(-1).to(torch.bfloat16)


def _to_4_bits(groups: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Integers as floats ``[features, groups, 32]``, and scales and centres ``[features, groups]``."""
    lowest, highest = _range(groups)
    middle, reach = lowest / 2 + highest / 2, highest / 15 - lowest / 15
    # In units of the reach, in which no square is too large for a float.
    relative = (groups - middle) / _not_zero(reach)
    integers = torch.zeros_like(groups)
    scales, centres = torch.zeros_like(middle), torch.zeros_like(middle)
    least = torch.full_like(middle, torch.inf)
    for candidate in _CANDIDATES:
        scale = _to_bfloat16(reach * candidate)
        # What -8 and 7 stand for lies around it.
        centre = _to_bfloat16(middle + scale / 2)
        tried = ((groups - centre) / _not_zero(scale)).round_().clamp_(-8, 7)
        weights = (tried * scale + (centre - middle)) / _not_zero(reach)
        error = weights.sub_(relative).square_().sum(-1, keepdim=True)
        better = error < least
        least = torch.where(better, error, least)
        scales, centres = torch.where(better, scale, scales), torch.where(better, centre, centres)
        integers = torch.where(better, tried, integers)
    return integers, scales.squeeze(-1).to(torch.bfloat16), centres.squeeze(-1).to(torch.bfloat16)


def _range(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and the largest of each group, ``[features, groups, 1]``."""
    lowest, highest = groups.aminmax(dim=-1, keepdim=True)
    if not (lowest.isfinite() & highest.isfinite()).all():
        raise ValueError("weights: expected finite numbers, got others among them")
    return lowest, highest


def _to_bfloat16(numbers: torch.Tensor) -> torch.Tensor:
    return numbers.to(torch.bfloat16).float()


def _not_zero(scales: torch.Tensor) -> torch.Tensor:
    return torch.where(scales == 0, 1, scales)


def _quantised_panels(weights: torch.Tensor, quantization: str) -> torch.Tensor:
    """``[weights, features, inputs]`` to bytes ``[panels, weights, inputs / 32, bytes of a group]``."""
    kind = QUANTIZATIONS[quantization]
    panels = torch.empty(kind.panel_shape(*weights.shape), dtype=torch.uint8)
    for part, out in zip(weights.split(FEATURES_AT_ONCE, dim=1), panels.split(FEATURES_AT_ONCE // PANEL), strict=True):
        integers, scales, centres = zip(*(quantise(weight, quantization) for weight in part), strict=True)
        numbers = [torch.stack(each) for each in (scales, centres) if each[0] is not None]
        write_panels(out, torch.stack(integers), numbers, kind)
    return panels


def _check_quantization(quantization: str) -> None:
    if quantization not in QUANTIZATIONS:
        raise ValueError(f"quantization: expected one of {list(QUANTIZATIONS)}, got {quantization!r}")


def _check_inputs(weight: torch.Tensor) -> None:
    if weight.dim() != 2 or not weight.numel() or weight.shape[1] % GROUP:
        raise ValueError(f"weights: expected a multiple of {GROUP} inputs, got {list(weight.shape)}")
