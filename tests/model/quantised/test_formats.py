"""Every format stands for the weights that it was made of, to the last bit, as floats and as blocks for native code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.model_zoo import build
from support.quantised_checkpoints import (
    Scheme,
    awq,
    float8,
    gptq,
    int8,
    pack,
    packed,
    torchao,
    torchao_float8,
    torchao_int4,
    write,
)

from radixkv.model.quantised import QuantisedFiles, UnreadableError
from radixkv.model.quantised.packed_integers import unpack
from radixkv.model.weights.deferred import build_without_weights
from radixkv.model.weights.paths import safetensors_of

# What weights are kept as: bits, type of scales, whether there are centres; "float8"; None: not at all.
HALF_4, FLOAT_4, HALF_8, FLOAT_8 = (
    (4, torch.float16, True),
    (4, torch.float32, True),
    (8, torch.float16, False),
    (8, torch.float32, False),
)
CENTRED_8 = (8, torch.float32, True)
CASES: dict[str, tuple[Scheme, Any]] = {
    "gptq-4-all": (gptq(4, -1), HALF_4),
    "gptq-4-32": (gptq(4, 32), HALF_4),
    "gptq-4-64-v2": (gptq(4, 64, v2=True), HALF_4),
    "gptq-4-128-asymmetric": (gptq(4, 128, sym=False), FLOAT_4),
    "gptq-4-32-asymmetric-v2": (gptq(4, 32, sym=False, v2=True), FLOAT_4),
    "gptq-4-64-ordered": (gptq(4, 64, desc_act=True), None),
    "gptq-4-48": (gptq(4, 48), HALF_4),
    "gptq-4-24": (gptq(4, 24), None),
    "gptq-8-128": (gptq(8, 128), HALF_8),
    "gptq-8-32-asymmetric": (gptq(8, 32, sym=False), CENTRED_8),
    "gptq-2-64": (gptq(2, 64), HALF_4),
    "awq-all": (awq(-1), FLOAT_4),
    "awq-32": (awq(32), FLOAT_4),
    "awq-64": (awq(64), FLOAT_4),
    "packed-4-all": (packed(4, -1), HALF_4),
    "packed-4-32-asymmetric": (packed(4, 32, sym=False), FLOAT_4),
    "packed-4-64-float32": (packed(4, 64, dtype=np.float32), FLOAT_8),
    "packed-4-64-ordered": (packed(4, 64, actorder=True), None),
    "packed-8-64": (packed(8, 64), HALF_8),
    "int8-channel": (int8("channel"), FLOAT_8),
    "int8-tensor": (int8("tensor"), FLOAT_8),
    "int8-channel-asymmetric": (int8("channel", sym=False, dtype=np.float16), CENTRED_8),
    "int8-channel-asymmetric-float32": (int8("channel", sym=False), None),
    "float8-block": (float8("block"), "float8"),
    "float8-tensor": (float8("tensor"), "float8"),
    "float8-channel": (float8("channel", "weight_scale"), "float8"),
    "float8-e5m2": (float8("tensor", dtype=torch.float8_e5m2), None),
    "torchao-8-all-float32": (torchao(8, -1, dtype=torch.float32), HALF_8),
    "torchao-8-64": (torchao(8, 64), HALF_8),
    "torchao-8-32-asymmetric": (torchao(8, 32, sym=False), CENTRED_8),
    "torchao-4-32": (torchao(4, 32), HALF_4),
    "torchao-4-64-asymmetric": (torchao(4, 64, sym=False), FLOAT_4),
    "torchao-int4-32": (torchao_int4(32), FLOAT_4),
    "torchao-int4-64": (torchao_int4(64), FLOAT_4),
    "torchao-float8-tensor": (torchao_float8("tensor"), "float8"),
    "torchao-float8-channel": (torchao_float8("channel"), "float8"),
}
Q_PROJ = "model.layers.0.self_attn.q_proj"
DOWN = "model.layers.0.mlp.down_proj"


def tiny(**options: Any) -> Any:
    """A model of one layer; with more than one block of 128 x 128, and other sizes."""
    sizes = {"hidden_size": 192, "head_dim": 48, "intermediate_size": 264, "num_hidden_layers": 1}
    return build("llama", sizes | options)


def open_files(folder: Path) -> QuantisedFiles:
    config = transformers.AutoConfig.from_pretrained(folder)
    return QuantisedFiles(
        safetensors_of(folder), config.quantization_config, build_without_weights(config, torch.float32)
    )


def change(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace tensors of the query projection, or take them away."""
    path = folder / "model.safetensors"
    given = load_file(path)
    for part, tensor in tensors.items():
        given.pop(f"{Q_PROJ}.{part}", None)
        given |= {} if tensor is None else {f"{Q_PROJ}.{part}": tensor}
    save_file(given, path)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_packed_integers_are_unpacked(bits: int) -> None:
    numbers = np.random.default_rng(0).integers(0, 1 << bits, (5, 64))
    assert unpack(torch.from_numpy(pack(numbers, bits)), bits).tolist() == numbers.tolist()


@pytest.mark.parametrize("case", CASES)
def test_weights_are_what_they_were_made_of(case: str, tmp_path: Path) -> None:
    """All that is read from a checkpoint, including embeddings and norms."""
    scheme, kept = CASES[case]
    down = case in ("awq-32", "awq-64", "packed-4-32-asymmetric") or case.startswith("torchao") or "64" in case
    truth = tiny(**({"intermediate_size": 256} if down else {}))
    write(truth, tmp_path, scheme)
    files = open_files(tmp_path)
    for name, parameter in truth.named_parameters():
        assert torch.equal(files.read(name).float(), parameter), name
    blocks = files.blocks(f"{Q_PROJ}.weight")
    if kept is None:
        assert blocks is None
        return
    assert blocks is not None
    assert torch.equal(blocks.dequantise(), truth.get_submodule(Q_PROJ).weight)
    if kept == "float8":
        assert blocks.integers.dtype == torch.float8_e4m3fn
    else:
        assert (blocks.bits, blocks.scales.dtype, blocks.centres is not None) == kept
    if truth.config.intermediate_size % 32:
        assert files.blocks(f"{DOWN}.weight") is None  # a product needs a multiple of 32 inputs


def test_a_zero_point_of_0_borrows_from_its_neighbour(tmp_path: Path) -> None:
    """As GPTQModel writes it: one is taken from whole words, and added to them again."""
    truth = tiny()
    scheme = gptq(4, 64, sym=False, v2=True)
    write(truth, tmp_path, scheme)
    path = tmp_path / "model.safetensors"
    given = load_file(path)
    for name in [name for name in given if name.endswith("qzeros")]:
        words = given[name] & ~0xF0F  # so that some zero points are 0
        given[name] = torch.from_numpy((words.numpy().view(np.uint32) - np.uint32(0x11111111)).view(np.int32))
        module = name.removesuffix(".qzeros")
        codes = unpack(given[f"{module}.qweight"].t(), 4).double()
        zeros, scales = (
            numbers.t().repeat_interleave(64, dim=1)[:, : codes.shape[1]].double()
            for numbers in (unpack(words, 4), given[f"{module}.scales"])
        )
        truth.get_submodule(module).weight.data.copy_((codes - zeros) * scales)
    save_file(given, path)
    config = dict(scheme.config) | {"checkpoint_format": "gptq"}
    files = QuantisedFiles(safetensors_of(tmp_path), config, build_without_weights(truth.config, torch.float32))
    assert torch.equal(files.read(f"{Q_PROJ}.weight"), truth.get_submodule(Q_PROJ).weight)


def test_biases_of_layers_without_them_are_refused_unless_they_are_zero(tmp_path: Path) -> None:
    """AutoGPTQ wrote such zeros."""
    truth = tiny()
    write(truth, tmp_path, gptq(4, 64))
    change(tmp_path, bias=torch.zeros(192, dtype=torch.float16))
    assert torch.equal(open_files(tmp_path).read(f"{Q_PROJ}.weight"), truth.get_submodule(Q_PROJ).weight)
    change(tmp_path, bias=torch.ones(192, dtype=torch.float16))
    with pytest.raises(UnreadableError, match=r"q_proj\.bias: expected no such tensor"):
        open_files(tmp_path)


I32 = torch.int32
DAMAGE: dict[str, tuple[Scheme, dict[str, Any], str]] = {
    "gptq-shape": (
        gptq(4, 64),
        {"qweight": torch.zeros(5, 192, dtype=I32)},
        r"q_proj\.qweight: expected shape \[24, 192\] of I32, got \[5, 192\] of I32",
    ),
    "gptq-type": (
        gptq(4, 64),
        {"qweight": torch.zeros(24, 192)},
        r"q_proj\.qweight: expected shape \[24, 192\] of I32, got \[24, 192\] of F32",
    ),
    "gptq-scales": (gptq(4, 64), {"scales": None}, r"q_proj\.scales: there is no such tensor, which .*q_proj\.qweight"),
    "gptq-zeros": (
        gptq(4, 64),
        {"qzeros": torch.zeros(3, 25, dtype=I32)},
        r"q_proj\.qzeros: expected shape \[3, 24\]",
    ),
    "gptq-order": (gptq(4, 64), {"g_idx": torch.zeros(191, dtype=I32)}, r"q_proj\.g_idx: expected shape \[192\]"),
    "gptq-weight": (
        gptq(4, 64),
        {"qweight": None},
        r"there is no tensor model\.layers\.0\.self_attn\.q_proj\.weight, quantised or not",
    ),
    "awq-groups": (
        awq(64),
        {"scales": torch.ones(1, 192)},
        r"q_proj\.scales: expected shape \[3, 192\] of F32 or F16 or BF16, got \[1, 192\]",
    ),
    "packed-shape": (
        packed(4, 64),
        {"weight_packed": torch.zeros(192, 5, dtype=I32)},
        r"q_proj\.weight_packed: expected integers of \[2, 4, 8\] bits for 192 inputs, got shape \[192, 5\]",
    ),
    "packed-scale": (packed(4, 64), {"weight_scale": None}, r"q_proj\.weight_scale: there is no such tensor"),
    "packed-groups": (
        packed(4, 64),
        {"weight_scale": torch.ones(192, 5)},
        r"q_proj\.weight_scale: expected shape .*\[192, 1\].* got \[192, 5\]",
    ),
    "int8-scale": (int8("channel"), {"weight_scale": None}, r"q_proj\.weight_scale: there is no such tensor"),
    "float8-scale": (float8("block"), {"weight_scale_inv": None}, r"q_proj\.weight_scale_inv: there is no such tensor"),
    "float8-blocks": (
        float8("block"),
        {"weight_scale_inv": torch.ones(2, 3)},
        r"q_proj\.weight_scale_inv: expected shape .* or \[2, 2\] of .*, got \[2, 3\]",
    ),
    "plain": (
        float8("block"),
        {"weight": torch.zeros(192, 191)},
        r"q_proj\.weight: expected shape \[192, 192\] of F32 or F16 or BF16, got \[192, 191\]",
    ),
    "torchao-scales": (
        torchao(8, 64),
        {"_weight_scale": torch.ones(192, 5)},
        r"q_proj\._weight_scale: expected shape .*\[192, 1\].* got \[192, 5\]",
    ),
    "torchao-int4-zeros": (
        torchao_int4(64),
        {"_weight_zero_point": None},
        r"q_proj\._weight_zero_point: there is no such tensor",
    ),
    "torchao-int4-tiles": (
        torchao_int4(64),
        {"_weight_qdata": torch.zeros(24, 2, 32, 4, dtype=I32)},
        r"q_proj\._weight_qdata: expected codes of Int8Tensor, .* got \[24, 2, 32, 4\] of I32",
    ),
    "torchao-inputs": (
        torchao(8, 64),
        {"_weight_act_pre_scale": torch.ones(192)},
        r"q_proj\._weight_qdata: expected codes of Int8Tensor, .* beside .*q_proj\._weight_act_pre_scale",
    ),
    "more": (awq(64), {"pre_quant_scale": torch.ones(192)}, r"q_proj\.pre_quant_scale: expected no such tensor"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_damaged_files_are_refused_by_the_name_of_a_tensor(case: str, tmp_path: Path) -> None:
    scheme, tensors, message = DAMAGE[case]
    write(tiny(intermediate_size=256), tmp_path, scheme)
    change(tmp_path, **tensors)
    with pytest.raises(UnreadableError, match=message):
        open_files(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "tensors", "message"),
    [
        (awq(64), {"scales": torch.full((3, 192), torch.inf)}, r"q_proj\.scales: expected finite numbers"),
        (
            gptq(4, 64),
            {"g_idx": torch.full((192,), 3, dtype=I32)},
            r"q_proj\.g_idx: expected groups from 0 to 2, got 3 to 3",
        ),
        (
            packed(4, 64),
            {"weight_shape": torch.tensor([192, 190])},
            r"q_proj\.weight_shape: expected \[192, 192\], got \[192, 190\]",
        ),
        (
            float8("block"),
            {"weight": torch.full((192, 192), torch.nan).to(torch.float8_e4m3fn)},
            r"q_proj\.weight: expected numbers, got NaN",
        ),
    ],
)
def test_impossible_numbers_are_refused_when_they_are_read(
    scheme: Scheme, tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    write(tiny(intermediate_size=256), tmp_path, scheme)
    change(tmp_path, **tensors)
    files = open_files(tmp_path)
    with pytest.raises(UnreadableError, match=message):
        files.read(f"{Q_PROJ}.weight")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "gptq", "bits": 3}, r"bits: expected one of \[2, 4, 8\], got 3"),
        (
            {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
            "checkpoint_format: expected .*, got 'marlin'",
        ),
        ({"quant_method": "awq", "version": "gemv"}, "version: expected 'gemm', got 'gemv'"),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "format: expected one of pack-quantized, .*, got 'nvfp4-pack-quantized'",
        ),
        (
            {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config: expected weights that are not sparse",
        ),
        (
            {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"u": {}}}},
            "transform_config: expected none",
        ),
    ],
)
def test_other_layouts_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    truth = tiny()
    truth.save_pretrained(tmp_path)
    with pytest.raises(UnreadableError, match=message):
        QuantisedFiles(safetensors_of(tmp_path), config, build_without_weights(truth.config, torch.float32))
