"""Quantised checkpoints as models: the answers are those of the same weights in floats, and weights keep their bits."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.hub_cache import Checkpoint, cached_snapshot
from support.model_zoo import SUPPORTED, build
from support.prompt_sets import tokens_of, tokens_of_transformers
from support.quantised_checkpoints import (
    Scheme,
    awq,
    float8,
    gptq,
    int8,
    packed,
    set_config,
    torchao,
    torchao_int4,
    write,
)
from tokenizers import Tokenizer, models

from radixkv import LLM
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loader import load_model
from radixkv.model.native import weights_of
from radixkv.model.weights.deferred import DeferredWeights
from radixkv_cpu import BlockWeight, library

SIZES: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 192, "num_hidden_layers": 2}
PROMPTS = [[5, 6, 7, 8, 9] * 4 + [i] for i in (10, 11, 12)]
# The scheme, and what linear layers are kept as.
CASES: dict[str, tuple[Scheme, set[str]]] = {
    "gptq": (gptq(4, 64), {"4 bits by float16"}),
    "gptq-ordered": (gptq(4, 64, desc_act=True), set()),
    "gptq-8": (gptq(8, 32, sym=False), {"8 bits by float32"}),
    "awq": (awq(64), {"4 bits by float32"}),
    "packed": (packed(4, 32, dtype=np.float32), {"8 bits by float32"}),
    "int8": (int8("channel"), {"8 bits by float32"}),
    "float8": (float8("block"), {"float8 by float32"}),
    "torchao": (torchao(8, -1), {"8 bits by float16"}),
    "torchao-int4": (torchao_int4(32), {"4 bits by float32"}),
}
needs_library = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


def tiny(**options: Any) -> Any:
    return build("llama", SIZES | options)


@needs_library
@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_those_of_the_weights_in_floats(case: str, tmp_path: Path) -> None:
    scheme, kept = CASES[case]
    truth = tiny(tie_word_embeddings=case in ("gptq", "float8"))
    write(truth, tmp_path, scheme)
    llm = LLM(tmp_path, dtype="float32", num_blocks=64)
    assert tokens_of(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS]) == tokens_of_transformers(
        truth, PROMPTS, 20
    )
    blocks = [weight for weight in weights_of(llm.engine.loaded.model) if isinstance(weight, BlockWeight)]
    assert {weight.kind for weight in blocks} == kept
    assert sum(weight.num_weights for weight in blocks) == (2 * 7 if kept else 0)


@needs_library
@pytest.mark.parametrize("plain", [("lm_head", "k_proj"), ("lm_head", "up_proj", "o_proj"), ()])
def test_layers_that_stay_as_they_are(plain: tuple[str, ...], tmp_path: Path) -> None:
    """Also among layers whose products are computed as one; and an output head that is quantised."""
    truth = tiny()
    write(truth, tmp_path, gptq(4, 32), plain)
    llm = LLM(tmp_path, dtype="float32", num_blocks=64)
    assert tokens_of(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS]) == tokens_of_transformers(
        truth, PROMPTS, 20
    )
    blocks = [weight for weight in weights_of(llm.engine.loaded.model) if isinstance(weight, BlockWeight)]
    # Those beside a plain one stay in their bits only where products are computed apart.
    least, most = {("lm_head", "k_proj"): (8, 12), ("lm_head", "up_proj", "o_proj"): (8, 10), (): (15, 15)}[plain]
    assert least <= sum(weight.num_weights for weight in blocks) <= most


@pytest.mark.parametrize("case", CASES)
def test_where_no_native_code_stands_in_weights_are_floats(case: str, tmp_path: Path) -> None:
    """As on a GPU: exactly those that they were made of, in the model's type."""
    truth = tiny()
    write(truth, tmp_path, CASES[case][0])
    for dtype in (torch.float32, torch.bfloat16):
        ours = load_model(tmp_path, ModelConfig(dtype=dtype), native=False).model
        wanted = truth.model.layers[1].self_attn.o_proj.weight.to(dtype)
        stored = ours.model.layers[1].self_attn.o_proj
        tokens = torch.eye(128, dtype=dtype)
        assert torch.equal(stored(tokens).t(), wanted)


@needs_library
def test_in_bfloat16_logits_differ_no_more_than_those_of_floats(tmp_path: Path) -> None:
    tokens = torch.arange(3, 40)[None]
    for case in ("gptq", "float8"):
        truth = tiny()
        write(truth, tmp_path / case, CASES[case][0])
        ours = load_model(tmp_path / case, ModelConfig(dtype="bfloat16")).model
        assert {weight.kind for weight in weights_of(ours) if isinstance(weight, BlockWeight)} == CASES[case][1]
        ours.set_attn_implementation("sdpa")
        with torch.inference_mode():
            expected, given = (model(tokens, use_cache=False).logits for model in (truth, ours))
            rounded = truth.to(torch.bfloat16)(tokens, use_cache=False).logits
        assert (given - expected).norm() <= 1.5 * (rounded - expected).norm()


@needs_library
def test_a_quantised_checkpoint_is_quantised_anew_if_asked(tmp_path: Path) -> None:
    """``quantization`` applies to the weights that a checkpoint stands for."""
    truth = tiny()
    write(truth, tmp_path, gptq(4, 64, desc_act=True))
    model = load_model(tmp_path, ModelConfig(dtype="float32", quantization="int8")).model
    assert not any(isinstance(weight, BlockWeight) for weight in weights_of(model))
    expected = load_model(truth, ModelConfig(quantization="int8")).model
    for one, other in zip(weights_of(model), weights_of(expected), strict=True):
        assert torch.equal(one.panels, other.panels)


@needs_library
@pytest.mark.parametrize("case", ["gptq", "gptq-ordered"])
def test_one_module_at_a_time_is_in_memory_as_floats(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tiny(), tmp_path, CASES[case][0])
    most = 0
    fill = DeferredWeights._fill

    def watch(self: DeferredWeights, parameter: torch.nn.Parameter) -> None:
        nonlocal most
        fill(self, parameter)
        most = max(most, sum(p.numel() for p in self._names if p.dim() > 1 and p not in self._placeholders))

    monkeypatch.setattr(DeferredWeights, "_fill", watch)
    load_model(tmp_path, ModelConfig(dtype="float32"))
    assert most == 3 * 128 * 192  # an MLP's


@needs_library
def test_models_are_named_by_how_they_are_quantised(tmp_path: Path) -> None:
    """Tiers keep their keys and values apart, even if the weights stand for the same."""
    truth = tiny()
    write(truth, tmp_path / "gptq", gptq(4, 64))
    truth.save_pretrained(tmp_path / "plain")
    names = [
        load_model(tmp_path / folder, ModelConfig(dtype="float32"), fingerprint=True).fingerprint
        for folder in ("gptq", "gptq", "plain")
    ]
    assert names[0] == names[1] != names[2]


def test_a_folder_that_says_how_in_a_file_beside(checkpoint_given: Checkpoint) -> None:
    """Also AutoGPTQ's older ones, which name their weights as they like."""
    folder = checkpoint_given.folder
    truth = tiny()
    scheme = gptq(4, 64)
    write(truth, folder, scheme)
    quantisation = {name: value for name, value in scheme.config.items() if name != "quant_method"}
    truth.config.save_pretrained(folder)
    (folder / "quantize_config.json").write_text(json.dumps(quantisation))
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-64g.safetensors")
    ours = load_model(checkpoint_given.model, ModelConfig(dtype="float32"), native=False).model
    assert ours.config.quantization_config["bits"] == 4  # the model's name depends on it
    tokens = torch.arange(3, 40)[None]
    ours.set_attn_implementation("sdpa")
    with torch.inference_mode():
        given, expected = ours(tokens, use_cache=False).logits, truth(tokens, use_cache=False).logits
    assert (given - expected).norm() <= 1e-5 * expected.norm()


def test_a_checkpoint_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the hub's cache, without a network."""
    folder = cached_snapshot(tmp_path, "some/model-GPTQ", monkeypatch)
    truth = tiny()
    truth.generation_config.eos_token_id = 77
    write(truth, folder, gptq(4, 64))
    words = Tokenizer(models.WordLevel({"word": 0}, unk_token="word"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(folder)
    loaded = load_model("some/model-GPTQ", ModelConfig(dtype="float32"), native=False)
    assert loaded.eos_token_ids == {77}
    wanted = truth.model.layers[1].self_attn.o_proj.weight
    assert torch.equal(loaded.model.model.layers[1].self_attn.o_proj(torch.eye(128)).t(), wanted)


def test_what_cannot_be_read_says_what_can(tmp_path: Path) -> None:
    write(tiny(), tmp_path, gptq(4, 64))
    given = load_file(tmp_path / "model.safetensors")
    given.pop("model.layers.1.mlp.up_proj.scales")
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(ModelLoadError, match=r"quantised by gptq, cannot be read: model.layers.1.mlp.up_proj.scales"):
        load_model(tmp_path)
    for method, refusal in (("modelopt", "it does not know the method"), ("aqlm", "aqlm")):
        set_config(tmp_path, {"quant_method": method, "bits": 4})
        message = (
            rf"quantised by {method}, cannot be read here \('{method}' is none of gptq, .*\), nor by transformers "
        )
        with pytest.raises(ModelLoadError, match=rf"{message}\(.*{refusal}.*\); possible are dense models of gptq"):
            load_model(tmp_path)


def test_a_head_of_its_own_is_refused_where_the_configuration_ties_it(tmp_path: Path) -> None:
    """It used to be dropped, and the embedding took its place."""
    truth = tiny(tie_word_embeddings=True)
    write(truth, tmp_path, gptq(4, 64))
    path = tmp_path / "model.safetensors"
    given = load_file(path)
    embedding = given["model.embed_tokens.weight"]
    save_file(given | {"lm_head.weight": embedding.clone()}, path)
    ours = load_model(tmp_path, ModelConfig(dtype="float32"), native=False).model
    assert torch.equal(ours.lm_head(torch.eye(128)).t(), truth.lm_head.weight)
    save_file(given | {"lm_head.weight": embedding + 1}, path)
    message = r"lm_head\.weight: expected the numbers of model\.embed_tokens\.weight, .* \"tie_word_embeddings\": false"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, ModelConfig(dtype="float32"), native=False)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    ours = load_model(tmp_path, ModelConfig(dtype="float32"), native=False).model
    assert torch.equal(ours.lm_head(torch.eye(128)).t(), (embedding + 1).float())


def test_a_quantised_head_is_refused_where_the_configuration_ties_it(tmp_path: Path) -> None:
    """torch cannot compare float8 with another type, and its error used to be passed on as it was."""
    write(tiny(tie_word_embeddings=True), tmp_path, float8("tensor"))
    path = tmp_path / "model.safetensors"
    given = load_file(path)
    head = given["model.embed_tokens.weight"].to(torch.float8_e4m3fn)
    save_file(given | {"lm_head.weight": head, "lm_head.weight_scale_inv": torch.ones(())}, path)
    message = r"lm_head\.weight: expected the numbers of model\.embed_tokens\.weight, .* \"tie_word_embeddings\": false"
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path, ModelConfig(dtype="float32"))


def test_a_method_without_a_name_is_refused(tmp_path: Path) -> None:
    """As MLX writes it."""
    write(tiny(), tmp_path, gptq(4, 64))
    set_config(tmp_path, {"bits": 4, "group_size": 64})
    with pytest.raises(
        ModelLoadError, match=r"quantised by an unnamed method, cannot be read here \(None is none of gptq"
    ):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("scheme", "wrong"),
    [
        (gptq(4, 64), {"group_size": "64"}),
        (awq(64), {"group_size": "64"}),
        (float8("block"), {"weight_block_size": [0, 128]}),
        (float8("block"), {"weight_block_size": "abc"}),
        (int8("channel"), {"config_groups": [1]}),
        (gptq(4, 64), {"quant_method": ["gptq"]}),
    ],
)
def test_a_configuration_that_no_package_writes_is_refused_by_its_name(
    scheme: Scheme, wrong: dict[str, Any], tmp_path: Path
) -> None:
    """Python's own errors used to be passed on."""
    write(tiny(), tmp_path, scheme)
    set_config(tmp_path, {**scheme.config, **wrong})
    with pytest.raises(ModelLoadError, match=rf"^{tmp_path}: quantization_config: .*expected .*, got "):
        load_model(tmp_path)


def test_experts_that_the_model_joins_are_left_to_transformers(tmp_path: Path) -> None:
    """For GPTQ, transformers asks for packages that are not installed."""
    truth = build("mixtral", SUPPORTED["mixtral"])
    write(truth, tmp_path, gptq(4, 16), ("lm_head", "gate"))
    given = load_file(tmp_path / "model.safetensors")
    for name in [name for name in given if ".experts." in name]:
        del given[name]
    given["model.layers.0.block_sparse_moe.experts.0.w1.qweight"] = torch.zeros(4, 48, dtype=torch.int32)
    save_file(given, tmp_path / "model.safetensors")
    with pytest.raises(
        ModelLoadError, match=r"cannot be read here \(there is no tensor .*experts.*, but .*w1\.qweight"
    ):
        load_model(tmp_path)


def test_layouts_of_torchao_for_one_kind_of_gpu_are_left_to_transformers(tmp_path: Path) -> None:
    """Which asks for the package; so it does where nothing is in safetensors."""
    write(tiny(), tmp_path, torchao_int4(32))
    path = tmp_path / "model.safetensors"
    given = load_file(path)
    for name in [name for name in given if name.endswith("_qdata")]:
        given[name] = given[name].view(torch.int32)
    save_file(given, path)
    message = (
        r"quantised by torchao, cannot be read here \(.*\), nor by transformers \(.*torchao.*\); possible are dense"
    )
    with pytest.raises(ModelLoadError, match=message) as error:
        load_model(tmp_path)
    assert "_weight_qdata: expected codes of Int8Tensor" in str(error.value)
    path.unlink()
    with pytest.raises(ModelLoadError, match=message):
        load_model(tmp_path)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    write(tiny(), tmp_path, gptq(4, 64))
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ModelLoadError, match="quantised by gptq, cannot be read"):
        load_model(tmp_path)
    shutil.move(path, tmp_path / "elsewhere")
    with pytest.raises(ModelLoadError, match="quantised by gptq, cannot be read"):
        load_model(tmp_path)
