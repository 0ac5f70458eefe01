"""GGUF files keep their own blocks, and answer as transformers does with their weights as floats."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.gguf_files import write_llama
from support.model_zoo import build
from support.prompt_sets import tokens_of, tokens_of_transformers

from radixkv import LLM, SamplingParams
from radixkv.config import ModelConfig
from radixkv.model.gguf import conversion as gguf_conversion
from radixkv.model.loader import load_model
from radixkv.model.native import weights_of
from radixkv.model.native.embedding import NativeEmbedding
from radixkv.model.weights import checkpoint
from radixkv.model.weights.deferred import CheckpointFiles, DeferredWeights
from radixkv.model.weights.paths import safetensors_of
from radixkv_cpu import BlockWeight, library

pytestmark = pytest.mark.usefixtures("model_cache")

# Rows of 256 weights, as the larger blocks want them.
SIZES: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 256, "num_hidden_layers": 2}
PROMPTS = [[5, 6, 7, 8, 9] * 4 + [i] for i in (10, 11, 12)]
needs_library = pytest.mark.skipif(library() is None, reason="no variant of the native code runs here")


def kind_of(name: str) -> str:
    """All kinds, several of them in one product; and one that is not kept."""
    part = name.split(".")[-2]
    mixed = {
        "attn_q": "Q4_K",
        "attn_k": "Q4_0",
        "attn_v": "Q6_K",
        "ffn_down": "Q5_0",
        "ffn_gate": "Q4_1",
        "ffn_up": "Q4_1",
    }
    return mixed.get(part, "Q8_0")


def reference(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)


@needs_library
@pytest.mark.parametrize("tied", [True, False])
def test_greedy_tokens_are_those_of_transformers(tied: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES | {"tie_word_embeddings": tied}), path, kind_of)
    with caplog.at_level(logging.INFO, "radixkv"):
        llm = LLM(path, dtype="float32", num_blocks=64)
    truth = reference(path)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    expected = tokens_of_transformers(truth, PROMPTS, 12)
    assert tokens_of(llm, [{"prompt_token_ids": prompt} for prompt in PROMPTS], params) == expected
    assert "blocks of its file in" in caplog.text
    model = llm.engine.loaded.model
    assert isinstance(model.get_input_embeddings(), NativeEmbedding)
    # All but the two down projections, whose kind is not kept.
    kept = [weight for weight in weights_of(model) if isinstance(weight, BlockWeight)]
    assert sum(weight.num_weights for weight in kept) == 2 * 6 + (1 if tied else 2)
    assert {weight.kind for weight in kept} == {"8 bits by float16", "4 bits by float16", "8 bits by float32"}


@needs_library
def test_quantised_anew_or_where_no_native_code_stands_in_a_file_is_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path)
    truth = reference(path)
    tokens = torch.arange(3, 40)[None]
    plain = load_model(path, ModelConfig(dtype="float32"), native=False).model
    for ours, bound in (
        (plain, 1e-5),
        (load_model(path, ModelConfig(dtype="float32", quantization="int8")).model, 0.1),
    ):
        ours.set_attn_implementation("sdpa")
        with torch.inference_mode():
            given, expected = ours(tokens, use_cache=False).logits, truth(tokens, use_cache=False).logits
        assert (given - expected).norm() <= bound * expected.norm()
    assert not any(isinstance(weight, BlockWeight) for weight in weights_of(plain))


@pytest.mark.parametrize("kind", ["F16", "BF16"])
def test_a_file_of_16_bits_takes_no_more_on_disk(kind: str, tmp_path: Path, model_cache: Path) -> None:
    """A file with F16 used to take twice as much, because it was kept as float32."""
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path, lambda _: kind)
    ours = load_model(path, ModelConfig(dtype="float32"), native=False).model
    (blocks,) = model_cache.glob("*/blocks.safetensors")
    assert blocks.stat().st_size < 1.01 * path.stat().st_size
    truth = reference(path)
    tokens = torch.arange(3, 40)[None]
    ours.set_attn_implementation("sdpa")
    with torch.inference_mode():
        given, expected = ours(tokens, use_cache=False).logits, truth(tokens, use_cache=False).logits
    assert (given - expected).norm() <= 1e-5 * expected.norm()


@needs_library
def test_a_file_whose_tensors_are_no_parameters_becomes_floats(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "tiny.gguf"
    write_llama(build("llama", SIZES), path)

    def refuse(path: Path, folder: Path) -> None:
        raise gguf_conversion.NotInBlocksError("experts are no tensor of their own there")

    monkeypatch.setattr(gguf_conversion, "_convert_in_blocks", refuse)
    model = load_model(path, ModelConfig(dtype="float32")).model
    assert "tiny.gguf cannot be kept in its own blocks (experts are no" in capsys.readouterr().err
    assert not any(isinstance(weight, BlockWeight) for weight in weights_of(model))
    assert not [folder for folder in model_cache.iterdir() if folder.name.endswith("-blocks")]


@needs_library
def test_blocks_that_are_not_there_are_refused() -> None:
    with pytest.raises(ValueError, match=r"quantization: expected None for .*, got 'gguf': there is no GGUF file"):
        load_model(build("llama", SIZES), ModelConfig(quantization="gguf"))


@needs_library
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_folder_is_read_one_module_at_a_time(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than one module is in memory as floats, and what is computed is what transformers loads."""
    options = SIZES | {"intermediate_size": 512}
    build("llama", options).save_pretrained(tmp_path / "model", max_shard_size="1MB")
    most = 0
    fill = DeferredWeights._fill

    def watch(self: DeferredWeights, parameter: torch.nn.Parameter) -> None:
        nonlocal most
        fill(self, parameter)
        most = max(most, sum(p.numel() for p in self._names if p.dim() > 1 and p not in self._placeholders))

    monkeypatch.setattr(DeferredWeights, "_fill", watch)
    ours = load_model(tmp_path / "model", ModelConfig(dtype=dtype)).model
    assert most == 3 * 256 * 512  # an MLP's
    monkeypatch.setattr(checkpoint, "_files", lambda *_: None)
    whole = load_model(tmp_path / "model", ModelConfig(dtype=dtype)).model
    for one, other in zip(weights_of(ours), weights_of(whole), strict=True):
        assert torch.equal(one.panels, other.panels)
    assert [type(module) for module in ours.modules()] == [type(module) for module in whole.modules()]
    assert ours.dtype == whole.dtype


def test_the_name_of_a_file_may_end_in_capitals(tmp_path: Path) -> None:
    """It used to be looked for on the hub."""
    path = tmp_path / "TINY.GGUF"
    write_llama(build("llama", SIZES), path)
    assert load_model(path, ModelConfig(dtype="float32")).vocab_size == 200


def test_folders_with_other_tensors_are_left_to_transformers(tmp_path: Path) -> None:
    model = build("llama", {"tie_word_embeddings": True})
    model.save_pretrained(tmp_path)
    assert CheckpointFiles(safetensors_of(tmp_path)).holds(model)
    assert not CheckpointFiles(safetensors_of(tmp_path)).holds(
        build("llama", {"tie_word_embeddings": True, "vocab_size": 100})
    )
    assert not CheckpointFiles(safetensors_of(tmp_path)).holds(build("llama", {"tie_word_embeddings": False}))
    assert not CheckpointFiles(safetensors_of(tmp_path)).holds(
        build("llama", {"tie_word_embeddings": True, "num_hidden_layers": 2})
    )
