"""Linear layers whose weights were quantised elsewhere: integers of 8 or 4 bits, or float8, with scales for 16 or 32 inputs.

They are kept as they are: a product multiplies by ``integers * scales + centres``, computed in float32, which is exact where
``integers * scales`` is. ``src/quantised.h`` describes their layout in memory; `quantised` makes such weights itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.formats import FEATURES_AT_ONCE, GROUP, Format, write_panels
from radixkv_cpu.linear import PANEL, Weight, check_weights, stack


class Blocks(NamedTuple):
    """A weight as integers and what they stand for: ``integers * scales + centres``.

    Attributes:
        bits: 8, or 4 where all integers are from 0 to 15.
        integers: int8 ``[features, inputs]``; or float8_e4m3fn without NaN, and then no centres, and scales of 32 inputs.
        scales: float16 or float32 ``[features, inputs / 32]`` or ``[features, inputs / 16]``.
        centres: of the same shape and type; None: zeros, with 8 bits.
    """

    bits: int
    integers: torch.Tensor
    scales: torch.Tensor
    centres: torch.Tensor | None

    def dequantise(self) -> torch.Tensor:
        """The weights that these stand for: float32 ``[features, inputs]``."""
        groups = self.integers.float().unflatten(-1, (self.scales.shape[1], -1)) * self.scales.float().unsqueeze(-1)
        if self.centres is not None:
            groups += self.centres.float().unsqueeze(-1)
        weights: torch.Tensor = groups.flatten(-2)
        return weights


# The smaller ones first.
_FORMATS = (
    Format(4, 4, torch.float16, is_centred=True),
    Format(5, 4, torch.float32, is_centred=True),
    Format(3, 8, torch.float16),
    Format(7, 8, torch.float32),
    Format(6, 8, torch.float32, is_centred=True, parts=2),
    Format(8, 8, torch.float32, integer=torch.float8_e4m3fn),
)


class BlockWeight(Weight):
    """Weights of `Blocks` in the order in which products read them; otherwise like `PackedWeight`.

    Args:
        blocks: one or more weights with the same number of inputs, a multiple of 32. If they are of different kinds, all are
            kept in the smallest format that represents each of them exactly.
        dtype: of inputs and products, float32 or bfloat16.
        biases: one per weight, or None.
        activation: a key of `ACTIVATIONS`, as of `PackedWeight`.

    Raises:
        ValueError: the blocks, their biases and the activation do not belong together; a scale or centre is not as `Blocks`
            says; or there are integers and float8.
    """

    def __init__(
        self,
        blocks: Sequence[Blocks],
        dtype: torch.dtype,
        biases: Sequence[torch.Tensor | None] = (),
        activation: str | None = None,
    ) -> None:
        # Tensors that have shapes and types, but no memory.
        shapes = [torch.zeros((), dtype=dtype).expand(part.integers.shape) for part in blocks]
        check_weights(shapes, biases, activation)
        if shapes[0].shape[1] % GROUP:
            raise ValueError(f"blocks: expected a multiple of {GROUP} inputs, got {list(shapes[0].shape)}")
        for i, part in enumerate(blocks):
            _check_numbers(f"blocks[{i}]", part)
        self._format = _format_of(blocks)
        panels = _panels(blocks, self._format, activation)
        super().__init__(panels, shapes, biases, activation, self._format.number, str(self._format))

    def rows(self, features: torch.Tensor) -> torch.Tensor:
        """The weights of some features: of an output head, the embeddings of tokens.

        Args:
            features: ``[...]`` integers, their numbers.

        Returns:
            ``[..., inputs]``, rounded to nearest.

        Raises:
            ValueError: the weights are those of a gated product.
            IndexError: there is no such feature.
        """
        self._check_features(features)
        kind = self._format
        panel, lane = features.reshape(-1) // PANEL, features.reshape(-1) % PANEL
        header, body = self.panels[:, 0].split((kind.header_bytes, kind.body_bytes), dim=-1)
        numbers = header.view(kind.dtype).unflatten(-1, (-1, PANEL))[panel, :, :, lane].float()
        if kind.bits == 8:
            integers = (
                body.view(torch.uint8).unflatten(-1, (GROUP, PANEL))[panel, :, :, lane].view(kind.integer).float()
            )
        else:
            # A word has the nibbles of inputs 0, 2, 1 and 3, of this feature and of the one 16 further on in turns.
            words = body.view(torch.int32).unflatten(-1, (GROUP // 4, 16))[panel, :, :, lane % 16]
            shifts = torch.tensor([0, 16, 8, 24]) + 4 * (lane // 16).unsqueeze(-1)
            integers = ((words.unsqueeze(-1) >> shifts[:, None, None]) & 15).flatten(-2)
        parts = integers.unflatten(-1, (kind.parts, -1)) * numbers[..., : kind.parts, None]
        if kind.is_centred:
            parts += numbers[..., kind.parts :, None]
        rows: torch.Tensor = parts.to(self.dtype).reshape(*features.shape, self.in_features)
        return rows


def _check_numbers(name: str, blocks: Blocks) -> None:
    features, inputs = blocks.integers.shape
    scales = blocks.scales
    check_tensor(f"{name}.scales", scales, [features, None], [torch.float16, torch.float32], 0)
    if scales.shape[1] not in (inputs // GROUP, inputs // GROUP * 2):
        raise ValueError(f"{name}.scales: expected one for 32 or 16 of {inputs} inputs each, got {list(scales.shape)}")
    if blocks.centres is not None:
        check_tensor(f"{name}.centres", blocks.centres, list(scales.shape), [scales.dtype], 0)


def _format_of(blocks: Sequence[Blocks]) -> Format:
    """The smallest format that represents all of these exactly."""
    found = next((kind for kind in _FORMATS if all(_holds(kind, part) for part in blocks)), None)
    if found is None:
        given = [(part.integers.dtype, part.bits, list(part.scales.shape)) for part in blocks]
        raise ValueError(f"blocks: expected integers of 4 or 8 bits, or float8 with scales of 32 inputs, got {given}")
    return found


def _holds(kind: Format, blocks: Blocks) -> bool:
    """Whether a format can represent all of these, to the last bit."""
    parts = blocks.scales.shape[1] // (blocks.integers.shape[1] // GROUP)
    return (
        kind.integer == blocks.integers.dtype
        and kind.bits >= blocks.bits
        and kind.dtype in (blocks.scales.dtype, torch.float32)
        and kind.parts >= parts
        and (kind.is_centred or blocks.centres is None)
    )


def _panels(blocks: Sequence[Blocks], kind: Format, activation: str | None) -> torch.Tensor:
    """uint8 ``[panels, weights, inputs / 32, bytes of a group]``."""
    integers = stack([part.integers.view(torch.int8) for part in blocks], activation)
    _, features, inputs = integers.shape
    numbers = [stack([_in_parts(part.scales, inputs, kind) for part in blocks], activation)]
    if kind.is_centred:
        centres = (torch.zeros_like(part.scales) if part.centres is None else part.centres for part in blocks)
        numbers.append(stack([_in_parts(centre, inputs, kind) for centre in centres], activation))
    panels = torch.empty(kind.panel_shape(*integers.shape), dtype=torch.uint8)
    for start in range(0, features, FEATURES_AT_ONCE):
        stop = start + FEATURES_AT_ONCE
        parts = [number[:, start:stop] for number in numbers]
        write_panels(panels[start // PANEL : stop // PANEL], integers[:, start:stop], parts, kind)
    return panels


def _in_parts(numbers: torch.Tensor, inputs: int, kind: Format) -> torch.Tensor:
    """Numbers repeated, so that there is one for each part of a group that the format has numbers for."""
    return numbers.to(kind.dtype).repeat_interleave(inputs // GROUP * kind.parts // numbers.shape[1], dim=1)
