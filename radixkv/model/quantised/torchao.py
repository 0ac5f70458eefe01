"""Checkpoints of torchao, as transformers saves them in safetensors.

torchao's tensors are of several classes, each with a layout of its own; their parts are saved as tensors of the module that
has the weight. Of a weight ``[features, inputs]``, a module has one of::

    _weight_qdata       int8 [features, inputs]        codes (Int8Tensor, IntxUnpackedToInt8Tensor)
    _weight_scale       float [features, groups], or one number
    _weight_zero_point  int8, as the scales; not always there

    _weight_qdata       int8 [features, inputs / 2]    pairs of signed codes of 4 bits, the first in the low ones (Int4Tensor)
    _weight_scale       float [groups, features]
    _weight_zero_point  float [groups, features]       what a code of 0 stands for

    _weight_qdata       float8 [features, inputs]      (Float8Tensor), see `float8`
    _weight_scale       float, as `float8` has them

Codes that are stored as int8 and fit in 4 bits are kept in 4. Scales and zero points of activations are not used. Other
classes are laid out for one kind of GPU, or scale a product's inputs, too: they are left to transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.model.quantised import float8
from radixkv.model.quantised.matrix import QuantisedMatrix
from radixkv.model.quantised.tensors import FLOATS, ModuleTensors, OtherLayoutError, StoredMatrix

_CODES, _SCALES, _ZEROS = "_weight_qdata", "_weight_scale", "_weight_zero_point"
_INPUT_SCALES = "_weight_act_pre_scale"
# What 4-bit codes with a sign are less than those without.
_MIDDLE = 8


@dataclass(frozen=True)
class _Bytes:
    tensors: ModuleTensors
    num_groups: int

    def read(self) -> QuantisedMatrix:
        codes = self.tensors.read(_CODES)
        scales = self.tensors.read_scales(_SCALES).reshape(-1, self.num_groups)
        zeros = torch.zeros(1, 1, dtype=torch.int16)
        if _ZEROS in self.tensors:
            zeros = self.tensors.read(_ZEROS).to(torch.int16).reshape(scales.shape)
        group_size = codes.shape[1] // self.num_groups
        lowest, highest = codes.aminmax()
        if lowest >= -_MIDDLE and highest < _MIDDLE:
            return QuantisedMatrix((codes + _MIDDLE).view(torch.uint8), 4, scales, zeros + _MIDDLE, group_size)
        return QuantisedMatrix(codes, 8, scales, zeros if zeros.any() else None, group_size)


@dataclass(frozen=True)
class _Pairs:
    tensors: ModuleTensors

    def read(self) -> QuantisedMatrix:
        pairs = self.tensors.read(_CODES).view(torch.uint8)
        codes = torch.stack([pairs & 0xF, pairs >> 4], dim=-1).flatten(-2) ^ _MIDDLE
        scales, centres = (self.tensors.read_scales(part).t() for part in (_SCALES, _ZEROS))
        zeros = torch.full((1, 1), _MIDDLE, dtype=torch.int16)
        return QuantisedMatrix(codes, 4, scales, zeros, codes.shape[1] // scales.shape[1], centres=centres)


def find(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix | None:
    """`Method.find`.

    Raises:
        OtherLayoutError: the weight is of a class that is not read here.
    """
    if _CODES not in tensors:
        return None
    features, inputs = shape
    stored = tensors.shape(_CODES), tensors.dtype(_CODES)
    if _INPUT_SCALES not in tensors and _SCALES in tensors and tensors.dtype(_SCALES) in FLOATS:
        if stored[1] in float8.DTYPES:
            return float8.find_as(tensors, shape, config, _CODES, _SCALES)
        if stored == ([features, inputs], "I8") and (_ZEROS not in tensors or tensors.dtype(_ZEROS) == "I8"):
            return _find_bytes(tensors, shape)
        if stored == ([features, inputs / 2], "I8"):
            return _find_pairs(tensors, shape)
    raise OtherLayoutError(
        f"{tensors.name(_CODES)}: expected codes of Int8Tensor, IntxUnpackedToInt8Tensor with whole zero points, Int4Tensor "
        f"or Float8Tensor for {features} features of {inputs} inputs, got {stored[0]} of {stored[1]} "
        f"beside {tensors.siblings()}"
    )


def _find_bytes(tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
    num_groups = tensors.num_groups(_SCALES, shape)
    if _ZEROS in tensors:
        tensors.check(_ZEROS, [tensors.shape(_SCALES)], ["I8"])
    return _Bytes(tensors, num_groups)


def _find_pairs(tensors: ModuleTensors, shape: tuple[int, int]) -> StoredMatrix:
    features, inputs = shape
    num_groups = tensors.size(_SCALES, 0)
    # Groups that do not divide the inputs would be of no known size.
    in_groups = [[num_groups, features]] if num_groups and inputs % num_groups == 0 else [[1, features]]
    tensors.check(_SCALES, in_groups, FLOATS)
    tensors.check(_ZEROS, in_groups, FLOATS)
    return _Pairs(tensors)
