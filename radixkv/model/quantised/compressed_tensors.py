"""Checkpoints of compressed-tensors, as llm-compressor writes them.

Of a weight ``[features, inputs]``, a module has one of::

    weight_packed      int32 [features, inputs * bits / 32]   codes, packed along inputs (pack-quantized)
    weight_shape       [2]
    weight_zero_point  int32 [features * bits / 32, groups]   packed along features, or int8 [features, groups]
    weight_g_idx       int32 [inputs]                         the group of each input; -1: in their order

    weight             int8 [features, inputs]                (int-quantized, naive-quantized)
    weight_zero_point  int8, as the scales

    weight             float8                                 (float-quantized, naive-quantized), see `float8`

and ``weight_scale``, ``[features, groups]``, ``[features, 1]``, or one number. Packed integers are stored without a sign,
more by half of their range; so are packed zero points. What else is there is for activations, which are not quantised here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from radixkv.model.quantised import float8
from radixkv.model.quantised.matrix import QuantisedMatrix
from radixkv.model.quantised.packed_integers import BITS, bits_of, num_words, unpack
from radixkv.model.quantised.tensors import ModuleTensors, StoredMatrix, UnreadableError

_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
# Those of single groups, and of weights that are not quantised.
_OTHER_LAYOUTS = ("mixed-precision", "dense")


@dataclass(frozen=True)
class _Packed:
    tensors: ModuleTensors
    shape: tuple[int, int]
    bits: int
    num_groups: int

    def read(self) -> QuantisedMatrix:
        features, inputs = self.shape
        given = self.tensors.read("weight_shape").tolist()
        if given != [features, inputs]:
            raise UnreadableError(f"{self.tensors.name('weight_shape')}: expected {[features, inputs]}, got {given}")
        codes = unpack(self.tensors.read("weight_packed"), self.bits)[:, :inputs]
        zeros = torch.full((1, 1), 1 << (self.bits - 1), dtype=torch.int16)
        if "weight_zero_point" in self.tensors:
            stored = self.tensors.read("weight_zero_point")
            if stored.dtype == torch.int32:
                zeros = unpack(stored.t(), self.bits)[:, :features].t().to(torch.int16)
            else:
                zeros = zeros + stored.to(torch.int16).reshape(-1, self.num_groups)
        group_of = None
        if "weight_g_idx" in self.tensors and (self.tensors.read("weight_g_idx") >= 0).any():
            group_of = self.tensors.read_groups("weight_g_idx", self.num_groups)
        scales = self.tensors.read_scales("weight_scale").reshape(-1, self.num_groups)
        return QuantisedMatrix(codes, self.bits, scales, zeros, inputs // self.num_groups, group_of)


@dataclass(frozen=True)
class _Bytes:
    tensors: ModuleTensors
    num_groups: int

    def read(self) -> QuantisedMatrix:
        codes, zeros = self.tensors.read("weight"), None
        if "weight_zero_point" in self.tensors:
            zeros = self.tensors.read("weight_zero_point").to(torch.int16).reshape(-1, self.num_groups)
        scales = self.tensors.read_scales("weight_scale").reshape(-1, self.num_groups)
        return QuantisedMatrix(codes, 8, scales, zeros, codes.shape[1] // self.num_groups)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what is laid out, or computed, in another way.

    Raises:
        UnreadableError: says what.
    """
    groups = (config.get("config_groups") or {}).values()
    for layout in [config.get("format"), *(group.get("format") for group in groups)]:
        if layout is not None and layout not in _LAYOUTS + _OTHER_LAYOUTS:
            raise UnreadableError(f"format: expected one of {', '.join(_LAYOUTS)}, got {layout!r}")
    sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
    if sparsity != "dense":
        raise UnreadableError(f"sparsity_config: expected weights that are not sparse, got format {sparsity!r}")
    if (config.get("transform_config") or {}).get("config_groups"):
        raise UnreadableError("transform_config: expected none, got transforms of activations")


def find(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix | None:
    """`Method.find`."""
    if "weight_packed" in tensors:
        return _find_packed(tensors, shape, config)
    if "weight" in tensors and tensors.dtype("weight") == "I8":
        tensors.check("weight", [shape], ["I8"])
        num_groups = tensors.num_groups("weight_scale", shape)
        if "weight_zero_point" in tensors:
            tensors.check("weight_zero_point", [tensors.shape("weight_scale")], ["I8"])
        return _Bytes(tensors, num_groups)
    return float8.find(tensors, shape, config)


def _find_packed(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix:
    features, inputs = shape
    declared = [(group.get("weights") or {}).get("num_bits") for group in (config.get("config_groups") or {}).values()]
    bits = next((bits_of(tensors.size("weight_packed", 1), inputs, each) for each in declared if each in BITS), None)
    if bits is None:
        raise UnreadableError(
            f"{tensors.name('weight_packed')}: expected integers of {sorted(BITS)} bits for {inputs} inputs, "
            f"got shape {tensors.shape('weight_packed')} and {declared} bits"
        )
    tensors.check("weight_packed", [[features, num_words(inputs, bits)]], ["I32"])
    tensors.check("weight_shape", [[2]], ["I32", "I64"])
    num_groups = tensors.num_groups("weight_scale", shape)
    if "weight_zero_point" in tensors:
        as_scales = tensors.dtype("weight_zero_point") == "I8"
        packed = [num_words(features, bits), num_groups]
        expected = tensors.shape("weight_scale") if as_scales else packed
        tensors.check("weight_zero_point", [expected], ["I8", "I32"])
    if "weight_g_idx" in tensors:
        tensors.check("weight_g_idx", [[inputs]], ["I32", "I64"])
    return _Packed(tensors, shape, bits, num_groups)
