"""Of models that also take images or audio, only the parts that read text are kept."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from support.model_zoo import VARIANTS, build_multimodal, build_supported
from support.prompt_sets import tokens_of, tokens_of_transformers
from transformers.models.pixtral.modeling_pixtral import PixtralVisionModel
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.voxtral.modeling_voxtral import VoxtralEncoder

from radixkv import LLM
from radixkv.config import ModelConfig
from radixkv.model.loader import load_model
from radixkv.model.replacement.unused_parts import drop_unused_parts

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


_EMU3 = {
    "vq_config": {"codebook_size": 8, "base_channels": 32, "channel_multiplier": [1], "hidden_size": 32},
    "vocabulary_map": {"<image>": 5, "<|extra_200|>": 7, "<|visual token 000000|>": 150},
}


@pytest.mark.parametrize(
    ("name", "options"),
    [("emu3", {}), ("llama4", VARIANTS["llama4_text+full"]), ("mllama", {"cross_attention_layers": [1]})],
)
def test_what_transformers_has_a_model_of_text_alone_for_is_loaded_without_a_warning(
    name: str, options: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of Llama 4 and mllama, one counted the tensors for images that were left out; Emu 3's text was not found."""
    model: Any = build_multimodal(name, options, **(_EMU3 if name == "emu3" else {}))
    model.save_pretrained(tmp_path)
    # As a whole, transformers' Llama 4 computes no text alone.
    expected = tokens_of_transformers(model.language_model if name == "llama4" else model, [[5, 6, 7, 8, 9]], 20)
    llm = LLM(tmp_path, num_blocks=50, dtype="float32")
    assert tokens_of(llm, [{"prompt_token_ids": [5, 6, 7, 8, 9]}]) == expected
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_warning_names_what_the_part_that_reads_text_has_no_parameter_for(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    build_multimodal("mllama", {"cross_attention_layers": [1]}).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    bias = "language_model.model.layers.0.self_attn.q_proj.bias"
    save_file(load_file(path) | {bias: torch.ones(32)}, path, {"format": "pt"})
    load_model(tmp_path, ModelConfig(dtype="float32"))
    (warning,) = (record.message for record in caplog.records if record.levelno == logging.WARNING)
    assert (
        warning
        == f"{tmp_path}: 1 of its tensors are left out, for they are no parameters of a MllamaForCausalLM, "
        + (f"{bias} among them")
    )


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
