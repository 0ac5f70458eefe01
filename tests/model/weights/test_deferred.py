"""Weights that are not in memory yet."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.model_zoo import SUPPORTED, WIDE, WIDE_EXPERTS, build, build_shallow
from torch import nn

from radixkv.config import ModelConfig
from radixkv.model.loader import load_model
from radixkv.model.weights import deferred as deferred_weights
from radixkv.model.weights.checkpoint import read_checkpoint
from radixkv.model.weights.deferred import CheckpointFiles, ProductsOfZeros
from radixkv.model.weights.paths import safetensors_of


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_model_from_files_is_what_transformers_makes_of_them(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Buffers, too: a checkpoint's used to be left as in a new model, and others were computed in bfloat16."""
    original = build_shallow(name)
    parameters = dict(original.named_parameters(remove_duplicate=False))
    for key, tensor in original.state_dict().items():
        if key not in parameters and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=torch.Generator().manual_seed(0)) / 2 + 0.25)
    original.save_pretrained(tmp_path)
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype)
    model, deferred = read_checkpoint(tmp_path, "a model", dtype, torch.device("cpu"), True)
    if deferred is not None:
        deferred.fill(model)
    assert model.dtype == model.config.dtype == dtype
    given = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for key, tensor in [*expected.named_parameters(), *expected.named_buffers()]:
        # Scales are kept more exactly than transformers does.
        assert torch.equal(given[key].to(tensor.dtype), tensor), key
        assert given[key].dtype == tensor.dtype or not tensor.dim(), key


def placeholder(features: int, inputs: int, bias: torch.Tensor | None) -> nn.Linear:
    """A placeholder as in a model whose weights are in files."""
    linear = nn.Linear(1, 1, bias=False)
    linear.weight = nn.Parameter(torch.zeros(()).expand(features, inputs), requires_grad=False)
    linear.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
    return linear


def test_zeros_that_stand_for_weights_are_never_written() -> None:
    """These would take four terabytes."""
    size = 1 << 20
    with ProductsOfZeros():
        product = placeholder(size, size, None)(torch.ones(2, size))
    assert product.shape == (2, size)
    assert not product.any()


@pytest.mark.parametrize("bias", [None, torch.arange(5.0)])
def test_results_are_those_of_multiplying(bias: torch.Tensor | None) -> None:
    zeros, weights = placeholder(5, 3, bias), nn.Linear(3, 5)
    x = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    with ProductsOfZeros():
        given = zeros(x), weights(x)
    assert torch.equal(given[0], zeros(x))
    assert torch.equal(given[1], weights(x))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_files_with_the_experts_of_a_layer_in_one_tensor_are_read(dtype: str, tmp_path: Path) -> None:
    """As a GGUF file is converted: torch refuses to multiply by groups of repeated zeros."""
    original = build("qwen3_moe", WIDE | WIDE_EXPERTS)
    original.config.save_pretrained(tmp_path)
    save_file(original.state_dict(), tmp_path / "model.safetensors", {"format": "pt"})
    assert CheckpointFiles(safetensors_of(tmp_path)).holds(original)
    load_model(tmp_path, ModelConfig(dtype=dtype))


def test_a_head_of_its_own_is_not_tied_by_a_configuration_that_says_so(tmp_path: Path) -> None:
    """It used to be dropped, and the embedding took its place; transformers compares them."""
    build("llama", {"tie_word_embeddings": True}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    head = torch.rand(tensors["model.embed_tokens.weight"].shape)
    for given in (tensors["model.embed_tokens.weight"].clone(), head):
        save_file(tensors | {"lm_head.weight": given}, path, {"format": "pt"})
        model, deferred = read_checkpoint(tmp_path, "a model", torch.float32, torch.device("cpu"), True)
        assert (deferred is None) == (given is head)
    assert torch.equal(model.lm_head.weight, head)
    assert torch.equal(model.model.embed_tokens.weight, tensors["model.embed_tokens.weight"])


def test_what_is_tied_may_be_stored_under_its_second_name(tmp_path: Path) -> None:
    """safetensors keeps either name of what two parameters share."""
    original = build("llama", {"tie_word_embeddings": True})
    original.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {"lm_head.weight": tensors.pop("model.embed_tokens.weight")}, path, {"format": "pt"})
    model, deferred = read_checkpoint(tmp_path, "a model", torch.float32, torch.device("cpu"), True)
    if deferred is not None:
        deferred.fill(model)
    assert torch.equal(model.model.embed_tokens.weight, original.lm_head.weight)


def test_what_is_tied_and_stored_twice_is_compared_a_few_rows_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both used to be in memory whole: for a large vocabulary, gigabytes."""
    monkeypatch.setattr(deferred_weights, "ROWS_OF_A_PIECE", 4)
    rows = torch.arange(30.0).reshape(10, 3)
    last = rows.clone()
    last[-1, -1] = 0
    codes = torch.ones(10, 3, dtype=torch.int8)
    others = {"same": rows.clone(), "last": last, "short": rows[:8].clone(), "long": torch.cat([rows, rows[:1]])}
    scalars = {"one": torch.ones(()), "again": torch.ones(()), "two": torch.full((), 2.0)}
    types = {"bfloat16": rows.bfloat16(), "codes": codes, "ones": torch.ones(10, 3), "same codes": codes.clone()}
    save_file({"rows": rows, **others, **scalars, **types}, tmp_path / "model.safetensors")
    files = CheckpointFiles(safetensors_of(tmp_path))
    assert files.is_stored_as("one", "again")
    assert not files.is_stored_as("one", "two")
    monkeypatch.delattr(CheckpointFiles, "read")
    assert [files.is_stored_as(name, "rows") for name in others] == [True, False, False, False]
    assert [files.is_stored_as("rows", name) for name in others] == [True, False, False, False]
    assert files.is_stored_as("missing", "rows")
    assert files.is_stored_as("bfloat16", "rows")
    assert files.is_stored_as("same codes", "codes")
    assert not files.is_stored_as("codes", "ones")


@pytest.mark.parametrize(
    "beside", ["model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json"]
)
def test_of_several_checkpoints_in_a_folder_the_one_that_transformers_loads_is_read(
    beside: str, tmp_path: Path
) -> None:
    """Old shards used to be read instead of the file that fine-tuning had written, and averages instead of the weights."""
    wanted, other = build("llama", {}, seed=1), build("llama", {}, seed=2)
    wanted.save_pretrained(tmp_path)
    if beside.startswith("pytorch_model.bin"):
        (tmp_path / "model.safetensors").unlink()
        torch.save(wanted.state_dict(), tmp_path / "pytorch_model.bin")
        if beside.endswith(".json"):
            (tmp_path / "pytorch_model.bin").rename(tmp_path / "shard.bin")
            weight_map = dict.fromkeys(wanted.state_dict(), "shard.bin")
            (tmp_path / beside).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        save_file(other.state_dict(), tmp_path / "ema.safetensors", {"format": "pt"})
    else:
        save_file(other.state_dict(), tmp_path / "model-00001-of-00001.safetensors", {"format": "pt"})
        weight_map = dict.fromkeys(other.state_dict(), "model-00001-of-00001.safetensors")
        (tmp_path / beside).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    model, deferred = read_checkpoint(tmp_path, "a model", torch.float32, torch.device("cpu"), True)
    if deferred is not None:
        deferred.fill(model)
    assert torch.equal(model.lm_head.weight, wanted.lm_head.weight)
