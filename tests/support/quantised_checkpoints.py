"""Tiny random checkpoints as quantisation packages write them, written here anew, in whole numbers, float64 and words.

Random codes, zero points and scales come first, and what each weight then is. Then all is packed, and a model of the same
weights in floats is the truth.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import nn

Tensors = dict[str, torch.Tensor]
Ints = NDArray[np.int64]
_TORCHAO = {"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig", "_version": 2}}}


@dataclass(frozen=True)
class Scheme:
    """How weights are quantised and packed.

    Attributes:
        config: the checkpoint's ``quantization_config``.
        make: the tensors of a weight ``[features, inputs]`` and what it is, in float64.
    """

    config: Mapping[str, Any]
    make: Callable[[int, int, np.random.Generator], tuple[Tensors, NDArray[np.float64]]]


def write(
    model: transformers.PreTrainedModel, folder: Path, scheme: Scheme, plain: Collection[str] = ("lm_head",)
) -> None:
    """Save a model with random quantised weights in place of those of its linear layers, and give it what they stand for.

    Args:
        plain: last parts of the names of linear layers that stay as they are.
    """
    generator = np.random.default_rng(0)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.half())
    tensors: Tensors = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] not in plain:
            parts, weight = scheme.make(*module.weight.shape, generator)
            module.weight.data.copy_(torch.from_numpy(weight))
            tensors |= {f"{name}.{part}": tensor.contiguous() for part, tensor in parts.items()}
    quantised = {name.rpartition(".")[0] for name in tensors}
    tied = model.config.tie_word_embeddings
    tensors |= {
        name: tensor.half().clone()
        for name, tensor in model.state_dict().items()
        if not (name.endswith(".weight") and name.rpartition(".")[0] in quantised)
        and not (tied and name == "lm_head.weight")
    }
    model.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    set_config(folder, scheme.config)


def set_config(folder: Path, quantisation: Mapping[str, Any]) -> None:
    """Say in a folder's configuration how it is quantised."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(quantisation)}))


def gptq(bits: int, group_size: int, *, sym: bool = True, desc_act: bool = False, v2: bool = False) -> Scheme:
    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        size = inputs if group_size == -1 else group_size
        groups = -(-inputs // size)
        group_of = np.arange(inputs) // size
        if desc_act:
            group_of = generator.permutation(group_of)
        codes, zeros, scales = _random(features, inputs, groups, bits, sym, generator, np.float16)
        if not v2:
            zeros = np.maximum(zeros, 1)  # less one, no 0 can be packed
        tensors = {
            "qweight": torch.from_numpy(pack(codes, bits).T.copy()),
            "qzeros": torch.from_numpy(pack(zeros.T - (0 if v2 else 1), bits)),
            "scales": torch.from_numpy(scales.T.astype(np.float16)),
        }
        if desc_act or not v2:  # GPTQModel leaves them out where they say nothing
            tensors["g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, (codes - zeros[:, group_of]) * scales[:, group_of]

    layout = {"checkpoint_format": "gptq_v2"} if v2 else {}
    config = {"quant_method": "gptq", "bits": bits, "group_size": group_size, "desc_act": desc_act, "sym": sym}
    return Scheme(config | layout, make)


def awq(group_size: int) -> Scheme:
    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        size = inputs if group_size == -1 else group_size
        codes, zeros, scales = _random(features, inputs, inputs // size, 4, False, generator, np.float16)

        def interleaved(numbers: Ints) -> torch.Tensor:
            order = [8 * (i // 8) + (0, 2, 4, 6, 1, 3, 5, 7)[i % 8] for i in range(features)]
            return torch.from_numpy(pack(numbers.T[:, order], 4))

        tensors = {"qweight": interleaved(codes), "qzeros": interleaved(zeros), "scales": torch.from_numpy(scales.T)}
        tensors["scales"] = tensors["scales"].half()
        group_of = np.arange(inputs) // size
        return tensors, (codes - zeros[:, group_of]) * scales[:, group_of]

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm", "zero_point": True}
    return Scheme(config, make)


def packed(bits: int, group_size: int, *, sym: bool = True, actorder: bool = False, dtype: Any = np.float16) -> Scheme:
    """compressed-tensors, pack-quantized; a group size of -1: by features."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        size = inputs if group_size == -1 else group_size
        group_of = np.arange(inputs) // size
        if actorder:
            group_of = generator.permutation(group_of)
        codes, zeros, scales = _random(features, inputs, inputs // size, bits, sym, generator, dtype)
        tensors = {
            "weight_packed": torch.from_numpy(pack(codes, bits)),
            "weight_scale": torch.from_numpy(scales.astype(dtype)),
            "weight_shape": torch.tensor([features, inputs]),
        }
        if not sym:
            tensors["weight_zero_point"] = torch.from_numpy(pack(zeros.T, bits).T.copy())
        if actorder:
            tensors["weight_g_idx"] = torch.from_numpy(group_of.astype(np.int32))
        return tensors, (codes - zeros[:, group_of]) * scales[:, group_of]

    strategy = "channel" if group_size == -1 else "group"
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": strategy, "group_size": group_size}
    return Scheme(_compressed("pack-quantized", weights), make)


def int8(strategy: str, *, sym: bool = True, dtype: Any = np.float32) -> Scheme:
    """compressed-tensors, int-quantized, with scales for activations."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        rows = 1 if strategy == "tensor" else features
        codes, zeros, scales = _random(features, inputs, 1, 8, sym, generator, dtype)
        zeros, scales = zeros[:rows], scales[:rows]
        tensors = {
            "weight": torch.from_numpy((codes - 128).astype(np.int8)),
            "weight_scale": torch.from_numpy(scales.astype(dtype)).reshape([1] if rows == 1 else [-1, 1]),
            "input_scale": torch.tensor([0.5]),
        }
        if not sym:
            tensors["weight_zero_point"] = torch.from_numpy((zeros - 128).astype(np.int8)).view_as(
                tensors["weight_scale"]
            )
        return tensors, (codes - zeros) * scales

    weights = {"num_bits": 8, "type": "int", "symmetric": sym, "strategy": strategy}
    return Scheme(_compressed("int-quantized", weights), make)


def float8(strategy: str, name: str = "weight_scale_inv", dtype: torch.dtype = torch.float8_e4m3fn) -> Scheme:
    """Of "fp8", or with ``weight_scale`` of compressed-tensors; by "tensor", "channel" or "block" of 128 x 128."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        block = {"tensor": (features, inputs), "channel": (1, inputs), "block": (128, 128)}[strategy]
        shape = [-(-size // part) for size, part in zip((features, inputs), block, strict=True)]
        codes = torch.from_numpy(generator.standard_normal((features, inputs))).to(dtype)
        scales = generator.uniform(0.1, 0.3, shape).astype(np.float32)
        rows, columns = np.arange(features) // block[0], np.arange(inputs) // block[1]
        stored = torch.tensor(float(scales[0, 0])) if strategy == "tensor" else torch.from_numpy(scales)
        weight = codes.double().numpy() * scales.astype(np.float64)[rows][:, columns]
        return {"weight": codes, name: stored}, weight

    if name == "weight_scale":
        weights = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy}
        return Scheme(_compressed("float-quantized", weights), make)
    blocks = {"weight_block_size": [128, 128]} if strategy == "block" else {}
    return Scheme({"quant_method": "fp8", "activation_scheme": "dynamic"} | blocks, make)


def torchao(bits: int, group_size: int, *, sym: bool = True, dtype: torch.dtype = torch.bfloat16) -> Scheme:
    """torchao's Int8Tensor (8 bits; a group size of -1: by features) and IntxUnpackedToInt8Tensor."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        size = inputs if group_size == -1 else group_size
        codes, zeros, scales = _random(features, inputs, inputs // size, bits, sym, generator, np.float16)
        stored = torch.from_numpy(scales).to(dtype)
        middle = 1 << (bits - 1)
        tensors = {
            "_weight_qdata": torch.from_numpy((codes - middle).astype(np.int8)),
            "_weight_scale": stored,
            "_weight_zero_point": torch.from_numpy((zeros - middle).astype(np.int8)),
            "_weight_act_quant_scale": torch.ones(1),  # for activations
        }
        group_of = np.arange(inputs) // size
        return tensors, (codes - zeros[:, group_of]) * stored.double().numpy()[:, group_of]

    return Scheme(_TORCHAO, make)


def torchao_int4(group_size: int) -> Scheme:
    """torchao's Int4Tensor: codes of 4 bits in pairs, and zero points in floats."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        codes = generator.integers(-8, 8, (features, inputs))
        scales, zeros = (
            torch.from_numpy(generator.uniform(low, high, (features, inputs // group_size))).bfloat16()
            for low, high in ((0.03, 0.1), (-0.5, 0.5))
        )
        pairs = (codes[:, ::2] & 15) + 16 * (codes[:, 1::2] & 15)
        tensors = {
            "_weight_qdata": torch.from_numpy(pairs.astype(np.uint8).view(np.int8)),
            "_weight_scale": scales.t(),
            "_weight_zero_point": zeros.t(),
        }
        by_input = (each.double().numpy().repeat(group_size, axis=1) for each in (scales, zeros))
        scale, zero = by_input
        return tensors, codes * scale + zero

    return Scheme(_TORCHAO, make)


def torchao_float8(strategy: str) -> Scheme:
    """torchao's Float8Tensor: as others have it, by other names."""

    def make(features: int, inputs: int, generator: np.random.Generator) -> tuple[Tensors, NDArray[np.float64]]:
        tensors, weight = float8(strategy).make(features, inputs, generator)
        return {"_weight_qdata": tensors["weight"], "_weight_scale": tensors["weight_scale_inv"]}, weight

    return Scheme(_TORCHAO, make)


def pack(numbers: Ints, bits: int) -> NDArray[np.int32]:
    """Rows of integers, the first in the lowest bits of a word of 32."""
    per_word = 32 // bits
    words = np.zeros((len(numbers), -(-numbers.shape[1] // per_word)), dtype=np.int64)
    for column in range(numbers.shape[1]):
        assert numbers[:, column].min() >= 0
        assert numbers[:, column].max() < 1 << bits
        words[:, column // per_word] += numbers[:, column] << (bits * (column % per_word))
    return words.astype(np.uint32).view(np.int32)


def _random(
    features: int, inputs: int, groups: int, bits: int, sym: bool, generator: np.random.Generator, dtype: Any
) -> tuple[Ints, Ints, NDArray[np.float64]]:
    """Codes ``[features, inputs]``, and zero points and scales ``[features, groups]``, these as numbers of a type."""
    codes = generator.integers(0, 1 << bits, (features, inputs))
    middle = 1 << (bits - 1)
    low, high = (middle, middle + 1) if sym else (1, 1 << bits)
    zeros = generator.integers(low, high, (features, groups))
    scales = (generator.uniform(0.5, 1.5, (features, groups)) / (1 << bits)).astype(dtype).astype(np.float64)
    return codes, zeros, scales


def _compressed(layout: str, weights: dict[str, Any]) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }
