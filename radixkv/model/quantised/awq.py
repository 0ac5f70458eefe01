"""AWQ's checkpoints (Lin et al. 2023), as AutoAWQ's GEMM version writes them.

A module has, of a weight ``[features, inputs]``::

    qweight  int32 [inputs, features / 8]   codes of 4 bits, packed along features
    qzeros   int32 [groups, features / 8]   zero points, packed alike
    scales   float [groups, features]

From the lowest bits on, a word has features 0, 2, 4, 6, 1, 3, 5 and 7 of its eight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.model.quantised.matrix import QuantisedMatrix
from radixkv.model.quantised.packed_integers import unpack
from radixkv.model.quantised.tensors import FLOATS, ModuleTensors, StoredMatrix, UnreadableError

_BITS = 4
_POSITIONS = (0, 4, 1, 5, 2, 6, 3, 7)
"""Positions of features 0 to 7 in a word."""


@dataclass(frozen=True)
class _Matrix:
    tensors: ModuleTensors
    group_size: int

    def read(self) -> QuantisedMatrix:
        codes = _unpack(self.tensors.read("qweight"))
        zeros = _unpack(self.tensors.read("qzeros")).to(torch.int16)
        return QuantisedMatrix(codes, _BITS, self.tensors.read_scales("scales").t(), zeros, self.group_size)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what is laid out in another way.

    Raises:
        UnreadableError: says what.
    """
    layout = str(config.get("version") or config.get("checkpoint_format") or config.get("format") or "gemm").lower()
    if layout != "gemm":
        raise UnreadableError(f"version: expected 'gemm', got {layout!r}")
    if config.get("bits", _BITS) != _BITS:
        raise UnreadableError(f"bits: expected {_BITS}, got {config['bits']!r}")


def find(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix | None:
    """`Method.find`."""
    if "qweight" not in tensors:
        return None
    features, inputs = shape
    tensors.check("qweight", [[inputs, features / 8]], ["I32"])
    declared = config.get("group_size") or 128
    group_size = inputs if declared < 0 else declared
    tensors.check("scales", [[inputs / group_size, features]], FLOATS)
    tensors.check("qzeros", [[inputs / group_size, features / 8]], ["I32"])
    return _Matrix(tensors, group_size)


def _unpack(words: torch.Tensor) -> torch.Tensor:
    """``[rows, words]`` to ``[features, rows]``."""
    codes: torch.Tensor = unpack(words, _BITS).unflatten(-1, (-1, 8))[..., _POSITIONS].flatten(-2).t().contiguous()
    return codes
