"""Tokenizers of a model's folder: what works without one, and what is refused of one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import transformers
from support.hub_cache import Checkpoint
from support.model_zoo import build, build_shallow, build_supported
from tokenizers import Tokenizer
from tokenizers.models import BPE

from radixkv import LLM, SamplingParams
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.loader import load_model


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


def test_without_a_tokenizer_what_is_cached_is_shown_by_token_ids() -> None:
    """It was refused with the advice to pass only token ids, which it was given."""
    llm = LLM(build_shallow("llama"), tokenizer=None, num_blocks=50, block_size=4)
    llm.generate({"prompt_token_ids": [5, 6, 7, 8, 9]}, SamplingParams(max_tokens=1), use_tqdm=False)
    explanation = llm.explain([5, 6, 7, 8, 1])
    assert "differs at token 4: `1` against `9`, after `5 6 7 8`" in str(explanation)
    assert [node.num_tokens for node in llm.inspect().nodes] == [5]
