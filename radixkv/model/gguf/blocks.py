"""Weights as GGUF files hold them: the kinds of blocks that native code computes with as they are.

A block stores some neighbouring weights of a row. The bit layout of each kind is that of ggml's ``ggml-common.h``, and of the
`gguf` package, which reads all kinds, into floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import gguf
import torch

from radixkv_cpu import Blocks


def dequantise(raw: torch.Tensor, kind: str) -> torch.Tensor:
    """The weights that blocks of any kind stand for.

    Args:
        raw: uint8 ``[rows, bytes of a row]``.
        kind: a name of `gguf.GGMLQuantizationType`.

    Returns:
        float32 ``[rows, weights of a row]``.
    """
    return torch.from_numpy(gguf.dequantize(raw.numpy(), gguf.GGMLQuantizationType[kind]))


def unpack(raw: torch.Tensor, kind: str) -> Blocks:
    """Integers, scales and centres of blocks of one of `KINDS`, which stand for the same weights.

    Args:
        raw: uint8 ``[rows, bytes of a row]``.
        kind: a key of `KINDS`.
    """
    block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]][1]
    return KINDS[kind](raw.unflatten(-1, (-1, block_bytes)))


def _q8_0(blocks: torch.Tensor) -> Blocks:
    """32 weights: a scale, and 32 signed bytes."""
    scales, integers = blocks.split((2, 32), dim=-1)
    return Blocks(8, integers.contiguous().view(torch.int8).flatten(-2), _halves(scales).flatten(-2), None)


def _q4_0(blocks: torch.Tensor) -> Blocks:
    """32 weights: a scale, and 16 bytes: nibbles from 0 to 15, of which 8 stands for 0."""
    scales, nibbles = blocks.split((2, 16), dim=-1)
    scales = _halves(scales).flatten(-2)
    centres = scales * -8
    if not centres.isfinite().all():  # beyond what 16 bits can say
        scales = scales.float()
        centres = scales * -8
    return Blocks(4, _nibbles(nibbles), scales, centres)


def _q4_1(blocks: torch.Tensor) -> Blocks:
    """32 weights: a scale, what 0 stands for, and 16 bytes of nibbles."""
    scales, centres, nibbles = blocks.split((2, 2, 16), dim=-1)
    return Blocks(4, _nibbles(nibbles), _halves(scales).flatten(-2), _halves(centres).flatten(-2))


def _q4_k(blocks: torch.Tensor) -> Blocks:
    """256 weights: units of 8 scales and of 8 minima, these of 6 bits in 12 bytes, and 128 bytes of nibbles."""
    unit, least_unit, packed, nibbles = blocks.split((2, 2, 12, 128), dim=-1)
    low, high, rest = packed.split(4, dim=-1)
    scales = torch.cat([low & 63, (rest & 15) | ((low >> 2) & 48)], dim=-1)
    minima = torch.cat([high & 63, (rest >> 4) | ((high >> 2) & 48)], dim=-1)
    return Blocks(
        4,
        _nibbles(nibbles.unflatten(-1, (4, 32))),
        (_halves(unit).float() * scales).flatten(-2),
        -(_halves(least_unit).float() * minima).flatten(-2),
    )


def _q6_k(blocks: torch.Tensor) -> Blocks:
    """256 weights: the lower 4 bits in 128 bytes, the upper 2 in 64, 16 scales of 8 bits, and a number for these."""
    low, high, scales, unit = blocks.split((128, 64, 16, 2), dim=-1)
    # Each half has 4 runs of 32 weights: two in the lower nibbles of 64 bytes, two in the upper; two bits of 32 bytes each.
    lower = torch.stack([part for half in low.split(64, dim=-1) for part in (half & 15, half >> 4)], dim=-2).flatten(-2)
    upper = torch.stack([(half >> shift) & 3 for half in high.split(32, dim=-1) for shift in (0, 2, 4, 6)], dim=-2)
    integers = (lower | (upper.flatten(-2) << 4)).to(torch.int8) - 32
    return Blocks(
        8, integers.flatten(-2), (_halves(unit).float() * scales.contiguous().view(torch.int8)).flatten(-2), None
    )


KINDS: Mapping[str, Callable[[torch.Tensor], Blocks]] = MappingProxyType(
    {
        "Q8_0": _q8_0,
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q4_K": _q4_k,
        "Q6_K": _q6_k,
    }
)
"""What takes blocks ``[rows, blocks, bytes]`` apart, by the names of `gguf.GGMLQuantizationType`."""


def _halves(numbers: torch.Tensor) -> torch.Tensor:
    """Two bytes to a float16: ``[..., 1]``."""
    return numbers.contiguous().view(torch.float16)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """``[rows, ..., bytes]`` to ``[rows, weights]``: of each run of bytes first all lower nibbles, then all upper ones."""
    return torch.cat([packed & 15, packed >> 4], dim=-1).view(torch.int8).flatten(1)
