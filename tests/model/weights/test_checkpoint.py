"""No model is loaded with weights that its files do not have."""

from __future__ import annotations

import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.gguf_files import write_llama, write_model
from support.hub_cache import Checkpoint
from support.model_zoo import build, build_supported
from support.quantised_checkpoints import Scheme, awq, float8, gptq, int8, write

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.model.gguf.conversion import BLOCKS_FILE, ensure_converted
from radixkv.model.loader import load_model
from radixkv.model.weights import checkpoint

SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, "num_hidden_layers": 2}
UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize("native", [True, False])
def test_a_checkpoint_without_a_weight_is_refused(native: bool, tmp_path: Path) -> None:
    build("llama", SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    del tensors[UP]
    save_file(tensors, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"got none for 1 of its parameters, {UP} among them"):
        load_model(tmp_path, ModelConfig(dtype="float32"), native=native)


@pytest.mark.parametrize("native", [True, False])
def test_a_checkpoint_with_a_weight_of_another_shape_is_refused(native: bool, tmp_path: Path) -> None:
    """transformers refers to a report that is not shown."""
    build("llama", SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"model.norm.weight": torch.ones(7)}, path, {"format": "pt"})
    message = rf"^{tmp_path}: model\.norm\.weight: expected shape \[128\], got \[7\]$"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, ModelConfig(dtype="float32"), native=native)


def test_a_warning_names_what_the_model_has_no_parameter_for(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers' own is silenced: a bias that a configuration forgets was left out, and nothing said so."""
    build("llama", SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("rotary_emb.inv_freq", "q_proj.bias"):  # the former is of old checkpoints, and computed anew
        tensors[f"model.layers.0.self_attn.{name}"] = torch.ones(16)
        save_file(tensors, path, {"format": "pt"})
        caplog.clear()
        load_model(tmp_path, ModelConfig(dtype="float32"))
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    left_out = "1 of its tensors are left out, for they are no parameters of a LlamaForCausalLM"
    assert warning == f"{tmp_path}: {left_out}, model.layers.0.self_attn.q_proj.bias among them"


def test_causal_masks_beside_the_weights_are_left_out_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Published checkpoints of GPT-Neo, and of models trained from GPT-2, hold them, some as bytes."""
    build("gpt2", SIZES).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    names = {"masked_bias": torch.float32, "attention.bias": torch.uint8}
    masks = {f"transformer.h.0.attn.{name}": torch.ones(1, dtype=dtype) for name, dtype in names.items()}
    save_file({**load_file(path), **masks}, path, {"format": "pt"})
    load_model(tmp_path, ModelConfig(dtype="float32"))
    assert not [record for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize("contents", ["cut", "cut in its header", "empty", "another program's"])
@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("native", [True, False])
def test_a_damaged_checkpoint_is_refused_by_its_name(
    native: bool, name: str, contents: str, checkpoint_given: Checkpoint
) -> None:
    """The errors of safetensors and torch name no file, and a pickle's advises to run what is in it."""
    folder = checkpoint_given.folder
    model = build("llama", SIZES)
    model.config.save_pretrained(folder)
    path = folder / name
    if path.suffix == ".bin":
        torch.save(model.state_dict(), path)
    else:
        save_file(model.state_dict(), path, {"format": "pt"})
    whole = path.read_bytes()
    path.write_bytes(
        {
            "cut": whole[:-5000],
            "cut in its header": whole[:50],
            "empty": b"",
            "another program's": pickle.dumps(Path("x"), protocol=2),
        }[contents]
    )
    with pytest.raises(ModelLoadError, match=f"^{folder}: ") as error:
        load_model(checkpoint_given.model, ModelConfig(dtype="float32"), native=native)
    assert "weights_only" not in str(error.value)
    assert name in str(error.value) or not native or path.suffix == ".bin"  # of several files, which one


@pytest.mark.parametrize(
    "contents",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": []}}',
    ],
)
@pytest.mark.parametrize("case", ["native", "whole", "quantised"])
def test_a_damaged_index_is_refused_by_its_name(case: str, contents: str, checkpoint_given: Checkpoint) -> None:
    """It used to end with an AttributeError and the like, or a JSONDecodeError that named no file."""
    folder = checkpoint_given.folder
    model = build("llama", SIZES)
    if case == "quantised":
        write(model, folder, gptq(4, 64))
        (folder / "model.safetensors").unlink()
    else:
        model.config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(contents)
    message = f"model.safetensors.index.json: expected a weight_map of file names, got '{contents}'"
    message = f"{folder}: its weights cannot be read, a file may be damaged: {message}"
    with pytest.raises(ModelLoadError, match=f"^{re.escape(message)}$"):
        load_model(checkpoint_given.model, ModelConfig(dtype="float32"), native=case != "whole")


@pytest.mark.parametrize("quantised", [True, False])
@pytest.mark.parametrize("kind", ["of torch", "of Python", "of a GPU"])
def test_too_little_memory_is_no_damage(
    kind: str, quantised: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files used to be called damaged for "[enforce fail at alloc_cpu.cpp:127] err == 0"."""
    model = build("llama", SIZES)
    model.config.save_pretrained(tmp_path)
    if quantised:  # read by transformers
        config = json.loads((tmp_path / "config.json").read_text())
        method = {"quant_method": "bitsandbytes", "load_in_8bit": True}
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))

    def load(*arguments: object) -> None:
        if kind == "of torch":
            torch.empty(1 << 50)
        raise MemoryError("no room") if kind == "of Python" else torch.OutOfMemoryError("no room. Try to allocate less")

    monkeypatch.setattr(checkpoint, "load_whole", load)
    reason = "DefaultCPUAllocator: can't allocate memory: you tried to allocate [0-9]+ bytes"
    reason = reason if kind == "of torch" else "no room"
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}: there is too little memory for its weights: {reason}$"):
        load_model(tmp_path, ModelConfig(dtype="float32"), native=False)


def fail_to_load(folder: Path, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with a model's configuration, of which transformers raises an error when it loads the weights."""
    build("llama", SIZES).config.save_pretrained(folder)

    def load(*arguments: object) -> None:
        raise error

    monkeypatch.setattr(checkpoint, "load_whole", load)


def test_a_model_that_blocks_cannot_serve_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """They were read whole first, also of a model that is too large for the machine."""
    build("falcon", {"head_dim": None}).config.save_pretrained(tmp_path)
    with pytest.raises(
        UnsupportedModelError, match=f"^{tmp_path}: the attention of FalconForCausalLM cannot be replaced"
    ):
        load_model(tmp_path, native=False)


@pytest.mark.parametrize("kind", [NotImplementedError, RecursionError])
def test_a_defect_of_code_is_no_damage(kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both are RuntimeErrors, which torch also raises for damaged files."""
    fail_to_load(tmp_path, kind("defect"), monkeypatch)
    with pytest.raises(kind, match=r"^defect$"):
        load_model(tmp_path, native=False)


def test_what_a_gpu_refuses_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that had been read were called damaged when they could not be moved to the GPU."""
    build("llama", SIZES).save_pretrained(tmp_path)

    def move(model: object, device: torch.device) -> None:
        raise RuntimeError("CUDA error: out of order")

    monkeypatch.setattr(transformers.PreTrainedModel, "to", move)
    with pytest.raises(RuntimeError, match=r"^CUDA error: out of order$"):
        load_model(tmp_path, native=False)


def test_too_little_memory_of_a_gpu_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build("llama", SIZES).save_pretrained(tmp_path)

    def move(model: object, device: torch.device) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Try to allocate less")

    monkeypatch.setattr(transformers.PreTrainedModel, "to", move)
    message = f"^{tmp_path}: there is too little memory for its weights: CUDA out of memory$"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, native=False)


def test_what_is_wrong_with_a_damaged_file_is_not_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's messages begin with the check that failed, which used to be taken for the first sentence."""
    message = "[enforce fail at inline_container.cc:260] . PytorchStreamReader failed. Advice follows."
    fail_to_load(tmp_path, RuntimeError(message), monkeypatch)
    with pytest.raises(ModelLoadError, match=r"a file may be damaged: PytorchStreamReader failed$"):
        load_model(tmp_path, native=False)


@pytest.mark.parametrize("damage", ["cut", "a length"])
def test_a_damaged_gguf_file_is_refused_by_its_name(damage: str, model_cache: Path, tmp_path: Path) -> None:
    """Errors may be of any class: gguf and transformers check little of what a file says."""
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path)
    whole = path.read_bytes()
    path.write_bytes(whole[:300] if damage == "cut" else whole[:31] + b"\x7f" + whole[32:])
    with pytest.raises(ModelLoadError, match=rf"^{path} could not be converted"):
        load_model(path, ModelConfig(dtype="float32"))
    assert not list(model_cache.iterdir())


def test_a_damaged_file_of_blocks_is_refused_by_its_folder(model_cache: Path, tmp_path: Path) -> None:
    """It ended with safetensors' own error, which names no file; its size is checked before, and is right here."""
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path)
    folder = ensure_converted(path, print, in_blocks=True)
    blocks = folder / BLOCKS_FILE
    whole = blocks.read_bytes()
    blocks.write_bytes(b"\x7f" * 8 + whole[8:])  # the length of its header
    with pytest.raises(ModelLoadError, match=f"^{folder}: its weights cannot be read, a file may be damaged: "):
        load_model(path, ModelConfig(dtype="float32"))


@pytest.mark.parametrize(
    ("written", "damaged"),
    [(b'"kinds":', b'"kindz":'), (b"Q8_0", b"Q8_9"), (rb"{\"", rb"{\\")],
    ids=["none", "unknown", "no JSON"],
)
def test_a_file_of_blocks_that_does_not_say_their_kinds_is_refused_by_name(
    written: bytes, damaged: bytes, model_cache: Path, tmp_path: Path
) -> None:
    """It ended with a KeyError."""
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path)
    blocks = ensure_converted(path, print, in_blocks=True) / BLOCKS_FILE
    whole = blocks.read_bytes()
    assert written in whole
    blocks.write_bytes(whole.replace(written, damaged, 1))
    with pytest.raises(ModelLoadError, match=f"{BLOCKS_FILE}: expected the kinds of its blocks in its metadata"):
        load_model(path, ModelConfig(dtype="float32"))


def test_a_gguf_file_without_a_weight_is_refused(
    model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add = gguf.GGUFWriter.add_tensor

    def add_others(self: Any, name: str, *arguments: Any, **options: Any) -> None:
        if name != "blk.1.ffn_up.weight":
            add(self, name, *arguments, **options)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
    write_llama(build("llama", SIZES), tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=rf"tiny\.gguf: expected all weights .*, {UP} among them"):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))
    assert not list(model_cache.iterdir())


def test_one_of_several_gguf_files_that_a_model_was_split_into_is_refused(model_cache: Path, tmp_path: Path) -> None:
    """Without the output head, which is in another file, it was loaded as a model that ties its own to the embedding."""
    write_model(build("llama", SIZES), tmp_path / "tiny.gguf", "llama", fields={"split.count": 2})
    with pytest.raises(ModelLoadError, match=r"split\.count: .* got one of 2; llama-gguf-split --merge joins them"):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))


def test_a_gguf_file_with_biases_that_the_model_lacks_is_refused(
    model_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers makes every file of the kind "llama" a model without biases."""
    start = gguf.GGUFWriter.add_bos_token_id

    def start_with_bias(self: Any, token_id: int) -> None:
        start(self, token_id)
        self.add_tensor("blk.0.attn_q.bias", np.ones(128, dtype=np.float32))

    monkeypatch.setattr(gguf.GGUFWriter, "add_bos_token_id", start_with_bias)
    write_llama(build("llama", SIZES), tmp_path / "tiny.gguf")
    with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.bias: expected no such tensor of a LlamaForCausalLM"):
        load_model(tmp_path / "tiny.gguf", ModelConfig(dtype="float32"))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32])
@pytest.mark.parametrize("native", [True, False])
def test_integers_that_stand_for_weights_are_refused(
    native: bool, dtype: torch.dtype, checkpoint_given: Checkpoint
) -> None:
    """The codes themselves were computed with."""
    folder = checkpoint_given.folder
    build("llama", SIZES).save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {UP: (tensors[UP] * 50).abs().to(dtype)}, path, {"format": "pt"})
    message = f"^{folder}: {UP}: expected floats, as its configuration has no quantization_config, got [IU](8|32)$"
    with pytest.raises(ModelLoadError, match=message):
        load_model(checkpoint_given.model, ModelConfig(dtype="float32"), native=native)


def test_integers_under_a_name_that_transformers_translates_are_refused(tmp_path: Path) -> None:
    model = build_supported("mixtral")
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    name = next(name for name in tensors if ".experts.0." in name)
    assert name not in model.state_dict()
    save_file(tensors | {name: (tensors[name] * 50).to(torch.int8)}, path, {"format": "pt"})
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}: {name}: expected floats"):
        load_model(tmp_path, ModelConfig(dtype="float32"))


@pytest.mark.parametrize("is_sharded", [True, False])
def test_integers_in_torch_s_own_format_are_refused_as_those_of_safetensors(
    is_sharded: bool, checkpoint_given: Checkpoint
) -> None:
    folder = checkpoint_given.folder
    model = build("llama", SIZES)
    model.config.save_pretrained(folder)
    codes = (model.state_dict()[UP] * 50).to(torch.int8)
    name = "pytorch_model-00001-of-00001.bin" if is_sharded else "pytorch_model.bin"
    torch.save(model.state_dict() | {UP: codes}, folder / name)
    if is_sharded:
        index = {"metadata": {}, "weight_map": dict.fromkeys(model.state_dict(), name)}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    message = f"^{folder}: {UP}: expected floats, as its configuration has no quantization_config, got torch.int8$"
    with pytest.raises(ModelLoadError, match=message):
        load_model(checkpoint_given.model, ModelConfig(dtype="float32"))
    torch.save(model.state_dict(), folder / name)
    assert load_model(checkpoint_given.model, ModelConfig(dtype="float32")).dtype == torch.float32


@pytest.mark.parametrize(
    ("scheme", "message"),
    [
        (int8("channel"), r"no quantization_config, got .*\.weight_scale"),
        (float8("tensor", "weight_scale"), r"no quantization_config, got .*\.weight_scale"),
        (float8("block"), r"no quantization_config, got .*\.weight_scale_inv"),
        (awq(64), r"got none for 14 of its parameters, .*it has .*\.qweight"),
        (gptq(4, 64), r"got none for 14 of its parameters, .*it has .*\.g_idx"),
    ],
)
def test_quantised_weights_of_which_the_configuration_says_nothing_are_refused(
    scheme: Scheme, message: str, tmp_path: Path
) -> None:
    """As where it says so in a file beside it, or by an old name."""
    write(build("llama", SIZES), tmp_path, scheme)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    config["compression_config"] = config.pop("quantization_config")
    path.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, ModelConfig(dtype="float32"))
