"""Integers of 2, 4 or 8 bits that are packed into words of 32, the first in the lowest bits."""

from __future__ import annotations

import torch

BITS = (4, 8, 2)
"""Bits of an integer that fill a word. With 3 bits, integers cross words, and programs disagree on zero points there."""


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Integers of packed words.

    Args:
        words: int32 ``[rows, words]``.
        bits: of an integer.

    Returns:
        uint8 ``[rows, integers]``.
    """
    packed = words.contiguous().view(torch.uint8)
    if bits == 8:
        return packed
    parts = [(packed >> shift) & ((1 << bits) - 1) for shift in range(0, 8, bits)]
    return torch.stack(parts, dim=-1).flatten(-2)


def num_words(count: int, bits: int) -> int:
    """Words that so many integers take."""
    return -(-count * bits // 32)


def bits_of(words: int, count: int, declared: int | None) -> int | None:
    """How many bits integers have of which ``count`` take so many words; None: none that can be read.

    Args:
        declared: by the configuration: preferred where few integers leave a choice.
    """
    candidates = sorted(BITS, key=lambda bits: bits != declared)
    return next((bits for bits in candidates if num_words(count, bits) == words), None)
