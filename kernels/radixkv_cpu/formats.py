"""How quantised weights lie in memory: integers in panels, in groups of 32 inputs, each behind its scales and centres."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixkv_cpu.linear import PANEL, pack

GROUP = 32
"""Inputs of a feature that lie behind one header."""
FEATURES_AT_ONCE = 64 * PANEL
"""Weights of so many features are quantised or packed at a time: the memory that this takes is small beside a model."""


class Format(NamedTuple):
    """A layout of ``src/quantised.h``.

    Attributes:
        number: of `Format` in ``src/calls.h``.
        bits: of an integer, 8 or 4.
        dtype: of scales and centres.
        is_centred: whether there are centres, as many as scales.
        parts: scales of a group.
        integer: type of an integer of 8 bits.
        lowest: the integer of 4 bits that is stored as 0.
    """

    number: int
    bits: int
    dtype: torch.dtype
    is_centred: bool = False
    parts: int = 1
    integer: torch.dtype = torch.int8
    lowest: int = 0

    def __str__(self) -> str:
        numbers = f"{self.bits} bits" if self.integer == torch.int8 else "float8"
        return f"{numbers} by {str(self.dtype).removeprefix('torch.')}"

    @property
    def header_bytes(self) -> int:
        """Bytes of a group's scales and centres, for all features of a panel."""
        return (2 if self.is_centred else 1) * self.parts * PANEL * self.dtype.itemsize

    @property
    def body_bytes(self) -> int:
        """Bytes of a group's integers, for all features of a panel."""
        return GROUP * PANEL * self.bits // 8

    def panel_shape(self, count: int, features: int, inputs: int) -> tuple[int, int, int, int]:
        """``[panels, weights, groups, bytes of a group]`` of ``count`` weights ``[features, inputs]``, in turns by panels."""
        return -(-features // PANEL), count, inputs // GROUP, self.header_bytes + self.body_bytes


def write_panels(panels: torch.Tensor, integers: torch.Tensor, numbers: Sequence[torch.Tensor], kind: Format) -> None:
    """Write groups, each with its header.

    Args:
        panels: uint8 ``[panels, weights, groups, bytes of a group]``, what is written to.
        integers: int8 ``[weights, features, inputs]``.
        numbers: scales, and centres if the format has any, ``[weights, features, parts of all groups]``.
        kind: the format.
    """
    header, body = panels.split((kind.header_bytes, kind.body_bytes), dim=-1)
    in_order = pack(integers).view(*panels.shape[:3], GROUP * PANEL)
    body[:] = in_order.view(torch.uint8) if kind.bits == 8 else _nibbles(in_order, kind.lowest)
    for part, number in zip(header.chunk(len(numbers), dim=-1), numbers, strict=True):
        words = number.view(torch.int16 if number.itemsize == 2 else torch.int32)
        part[:] = pack(words).view(*part.shape[:3], -1).view(torch.uint8)


def _nibbles(integers: torch.Tensor, lowest: int) -> torch.Tensor:
    """``[..., 1024]`` integers to bytes ``[..., 512]``: of every 8 vectors of 16, one in each nibble of 16 words."""
    # The last dimensions but one are: two pairs of inputs, the inputs of each, and the halves of a panel.
    vectors = (integers.to(torch.int32) - lowest).unflatten(-1, (8, 2, 2, 2, 16))
    words = torch.zeros_like(vectors[..., 0, 0, 0, :])
    for pair, i, half in itertools.product(range(2), repeat=3):
        words |= vectors[..., pair, i, half, :] << (16 * i + 8 * pair + 4 * half)
    packed: torch.Tensor = words.flatten(-2).view(torch.uint8)
    return packed
