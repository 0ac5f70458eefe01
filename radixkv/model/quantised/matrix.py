"""A quantised weight in one form, whatever format it came from."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from radixkv_cpu import Blocks

# Rows that become floats at a time: their memory is little beside a matrix.
_ROWS_AT_ONCE = 1024
# Inputs that a product has scales for.
_BLOCK = 32


@dataclass(frozen=True)
class QuantisedMatrix:
    """A weight ``[features, inputs]`` as ``(codes - zeros) * scales + centres``.

    Attributes:
        codes: uint8, int8 or a float of 8 bits, ``[features, inputs]``.
        bits: of a code.
        scales: float32 ``[features or 1, groups]``.
        zeros: int16 ``[features or 1, groups or 1]``; None: zeros.
        group_size: inputs of a group, of which the last may have fewer.
        group_of: int64 ``[inputs]``, the group of each input, where groups are no runs of inputs (activation order); or None.
        centres: float32 ``[features, groups]``, of codes without a sign of at most 4 bits; None: zeros.
    """

    codes: torch.Tensor
    bits: int
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    group_of: torch.Tensor | None = None
    centres: torch.Tensor | None = None

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The weights that codes stand for, computed in float32: ``[features, inputs]``."""
        weights = torch.empty(self.codes.shape, dtype=dtype)
        for start in range(0, len(weights), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            part = self.codes[rows].float()
            if self.zeros is not None:
                self._change(part, torch.Tensor.sub_, self.zeros, rows)
            self._change(part, torch.Tensor.mul_, self.scales, rows)
            if self.centres is not None:
                self._change(part, torch.Tensor.add_, self.centres, rows)
            weights[rows] = part
        return weights

    def blocks(self) -> Blocks | None:
        """The same for native code, to the last bit; None: its formats cannot represent this exactly."""
        inputs = self.codes.shape[1]
        per_block = next((size for size in (_BLOCK, _BLOCK // 2) if self.group_size % size == 0), None)
        if self.group_of is not None or inputs % _BLOCK or per_block is None:
            return None
        if self.codes.is_floating_point():
            is_kept = self.codes.dtype == torch.float8_e4m3fn and per_block == _BLOCK
            return Blocks(8, self.codes, self._by_blocks(self.scales, _BLOCK), None) if is_kept else None
        scales = self._by_blocks(self.scales, per_block)
        zeros = torch.zeros(1, 1) if self.zeros is None else self._by_blocks(self.zeros, per_block).float()
        is_unsigned = self.codes.dtype == torch.uint8
        # With scales of so few bits, products with codes and zeros are exact in float32, and so are their sums.
        is_exact = _has_few_bits(self.scales)
        if is_exact and is_unsigned and self.bits <= 4:
            # In float64, because what it adds up to may have no place in float32.
            exact = -(zeros * scales).double()
            if self.centres is not None:
                exact += self._by_blocks(self.centres, per_block)
            if torch.equal(exact.float().double(), exact):
                scales, centres = _narrow(scales, exact.float())
                return Blocks(4, self.codes.view(torch.int8), scales, centres)
        if self.centres is not None:
            return None
        centred = self._centred()
        if centred is not None:
            (scales,) = _narrow(scales)
            return Blocks(8, centred, scales, None)
        if not is_exact:
            return None
        middle = 128 if is_unsigned else 0
        signed = (self.codes.to(torch.int16) - middle).to(torch.int8)
        return Blocks(8, signed, scales, (middle - zeros) * scales)

    def _centred(self) -> torch.Tensor | None:
        """Codes less zeros, int8; None: they do not fit."""
        if self.zeros is None and self.codes.dtype == torch.int8:
            return self.codes
        centred = torch.empty(self.codes.shape, dtype=torch.int8)
        for start in range(0, len(centred), _ROWS_AT_ONCE):
            rows = slice(start, start + _ROWS_AT_ONCE)
            part = self.codes[rows].to(torch.int16)
            if self.zeros is not None:
                self._change(part, torch.Tensor.sub_, self.zeros, rows)
            lowest, highest = part.aminmax()
            if lowest < -128 or highest > 127:
                return None
            centred[rows] = part
        return centred

    def _change(
        self,
        part: torch.Tensor,
        operation: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        numbers: torch.Tensor,
        rows: slice,
    ) -> None:
        """Change some rows in place, by numbers of their groups."""
        numbers = numbers if len(numbers) == 1 else numbers[rows]
        num_groups, inputs = numbers.shape[1], part.shape[1]
        if num_groups == 1:
            operation(part, numbers)
        elif self.group_of is not None:
            operation(part, numbers[:, self.group_of])
        elif num_groups * self.group_size == inputs:  # without a copy for each input
            operation(part.unflatten(1, (num_groups, -1)), numbers.unsqueeze(-1))
        else:
            operation(part, numbers.repeat_interleave(self.group_size, dim=1)[:, :inputs])

    def _by_blocks(self, numbers: torch.Tensor, size: int) -> torch.Tensor:
        """Numbers of groups as numbers of blocks of so many inputs: ``[features, blocks]``."""
        features, inputs = self.codes.shape
        firsts = torch.arange(0, inputs, size) // (inputs if numbers.shape[1] == 1 else self.group_size)
        return numbers.expand(features, -1)[:, firsts]


def _has_few_bits(scales: torch.Tensor) -> bool:
    """Whether scales are numbers of one of the types with 16 bits: their fractions have 11 bits at most."""
    return any(torch.equal(scales.to(dtype).float(), scales) for dtype in (torch.float16, torch.bfloat16))


def _narrow(*numbers: torch.Tensor) -> list[torch.Tensor]:
    """In float16, if all are numbers of that type."""
    halves = [each.to(torch.float16) for each in numbers]
    is_exact = all(torch.equal(half.float(), each) for half, each in zip(halves, numbers, strict=True))
    return halves if is_exact else [*numbers]
