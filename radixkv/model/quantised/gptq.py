"""GPTQ's checkpoints (Frantar et al. 2022), as AutoGPTQ and GPTQModel write them.

A module has, of a weight ``[features, inputs]``::

    qweight  int32 [inputs * bits / 32, features]   codes, packed along inputs
    qzeros   int32 [groups, features * bits / 32]   zero points, packed along features
    scales   float [groups, features]
    g_idx    int32 [inputs]                         the group of each input; not always there

Zero points are stored less one (``checkpoint_format`` "gptq") or as they are ("gptq_v2"). GPTQModel takes the one from whole
words, so that a zero point of 0 borrows from its neighbour, and adds it to whole words again: so does this, and files of
AutoGPTQ, which have no zero points of 0, read the same. With ``desc_act`` an input's group can be any; where it is not its
place, the matrix becomes floats.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from radixkv.model.quantised.matrix import QuantisedMatrix
from radixkv.model.quantised.packed_integers import BITS, bits_of, num_words, unpack
from radixkv.model.quantised.tensors import FLOATS, ModuleTensors, StoredMatrix, UnreadableError

# A one for each integer of a word.
_ONES = MappingProxyType({2: 0x55555555, 4: 0x11111111, 8: 0x01010101})


@dataclass(frozen=True)
class _Matrix:
    tensors: ModuleTensors
    shape: tuple[int, int]
    bits: int
    num_groups: int
    group_size: int | None
    is_v1: bool

    def read(self) -> QuantisedMatrix:
        features, inputs = self.shape
        codes = unpack(self.tensors.read("qweight").t(), self.bits)[:, :inputs]
        words = self.tensors.read("qzeros").numpy().view(np.uint32)
        words = words + np.uint32(_ONES[self.bits] if self.is_v1 else 0)
        zeros = unpack(torch.from_numpy(words.view(np.int32)), self.bits)[:, :features].t().to(torch.int16)
        scales = self.tensors.read_scales("scales").t()
        group_size, group_of = self.group_size, None
        if "g_idx" in self.tensors:
            group_of = self.tensors.read_groups("g_idx", self.num_groups)
            group_size = max(1, int((group_of == 0).sum()))
            if torch.equal(group_of, torch.arange(inputs) // group_size):
                group_of = None
        assert group_size is not None
        return QuantisedMatrix(codes, self.bits, scales, zeros, group_size, group_of)


def check_config(config: Mapping[str, Any]) -> None:
    """Refuse what is laid out in another way.

    Raises:
        UnreadableError: says what.
    """
    layout = _layout(config)
    if layout not in ("gptq", "gptq_v2"):
        raise UnreadableError(f"checkpoint_format: expected 'gptq' or 'gptq_v2', got {layout!r}")
    if config.get("bits") not in BITS:
        raise UnreadableError(f"bits: expected one of {sorted(BITS)}, got {config.get('bits')!r}")


def find(tensors: ModuleTensors, shape: tuple[int, int], config: Mapping[str, Any]) -> StoredMatrix | None:
    """`Method.find`."""
    if "qweight" not in tensors:
        return None
    features, inputs = shape
    # GPTQModel's ``dynamic`` lets modules differ.
    bits = bits_of(tensors.size("qweight", 0), inputs, config["bits"])
    expected = num_words(inputs, bits or config["bits"])
    tensors.check("qweight", [[expected, features]], ["I32"])
    assert bits is not None
    num_groups = tensors.size("scales", 0)
    tensors.check("scales", [[num_groups, features]], FLOATS)
    tensors.check("qzeros", [[num_groups, num_words(features, bits)]], ["I32"])
    group_size = _group_size(inputs, num_groups, config.get("group_size"))
    if "g_idx" in tensors:
        tensors.check("g_idx", [[inputs]], ["I32", "I64"])
    elif group_size is None:
        raise UnreadableError(
            f"{tensors.name('scales')}: expected groups of {config.get('group_size')} of {inputs} inputs, got {num_groups}"
        )
    return _Matrix(tensors, shape, bits, num_groups, group_size, _layout(config) == "gptq")


def _layout(config: Mapping[str, Any]) -> str:
    return str(config.get("checkpoint_format") or config.get("format") or "gptq").lower()


def _group_size(inputs: int, num_groups: int, declared: int | None) -> int | None:
    """None: no group size gives that number of groups."""
    if num_groups == 1:
        return inputs
    if declared is not None and declared > 0 and -(-inputs // declared) == num_groups:
        return declared
    return inputs // num_groups if num_groups and inputs % num_groups == 0 else None
