"""Weights as floats of 8 bits with scales.

A module has ``weight`` in float8_e4m3fn or float8_e5m2, and ``weight_scale_inv`` (DeepSeek's and Qwen's checkpoints, ``fp8``)
or ``weight_scale`` (compressed-tensors, ``fbgemm_fp8``), which a weight is multiplied by, whatever the name says: one number
for all of it, one for each feature, or one for each block of 128 x 128. What else is there is for activations, which are not
quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.model.quantised.matrix import QuantisedMatrix
from radixkv.model.quantised.tensors import FLOATS, ModuleTensors, StoredMatrix, UnreadableError

DTYPES = ("F8_E4M3", "F8_E5M2")
_SCALES = ("weight_scale_inv", "weight_scale")
_BLOCK = (128, 128)


@dataclass(frozen=True)
class _Matrix:
    tensors: ModuleTensors
    shape: tuple[int, int]
    codes: str
    scales: str
    block: tuple[int, int]

    def read(self) -> QuantisedMatrix:
        features, inputs = self.shape
        codes = self.tensors.read(self.codes)
        if codes.dtype == torch.float8_e4m3fn and (codes.view(torch.uint8) & 0x7F == 0x7F).any():
            raise UnreadableError(f"{self.tensors.name(self.codes)}: expected numbers, got NaN among them")
        scales = self.tensors.read_scales(self.scales)
        if scales.numel() == 1:
            return QuantisedMatrix(codes, 8, scales.reshape(1, 1), None, inputs)
        if scales.numel() == features and scales.shape[0] == features:
            return QuantisedMatrix(codes, 8, scales.reshape(features, 1), None, inputs)
        rows = scales.repeat_interleave(self.block[0], dim=0)[:features]
        return QuantisedMatrix(codes, 8, rows, None, self.block[1])


def find(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix | None:
    """`Method.find`."""
    if "weight" not in tensors or tensors.dtype("weight") not in DTYPES:
        return None
    return find_as(tensors, shape, config, "weight", next((name for name in _SCALES if name in tensors), _SCALES[0]))


def find_as(
    tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any], codes: str, scales: str
) -> StoredMatrix:
    """A weight of this kind whose tensors have other names, as `find` does it.

    Raises:
        UnreadableError: they are not there, or of other shapes or types.
    """
    features, inputs = shape
    tensors.check(codes, [shape], DTYPES)
    block = _block(config)
    by_blocks = [-(-features // block[0]), -(-inputs // block[1])]
    tensors.check(scales, [[], [1], [1, 1], [features], [features, 1], by_blocks], [*FLOATS, "F8_E8M0"])
    return _Matrix(tensors, shape, codes, scales, block)


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Features and inputs of a block."""
    groups = (config.get("config_groups") or {}).values()
    structures = [(group.get("weights") or {}).get("block_structure") for group in groups]
    given = next((each for each in [config.get("weight_block_size"), *structures] if each), _BLOCK)
    features, inputs = given.split("x") if isinstance(given, str) else given
    return int(features), int(inputs)
