"""Models that transformers loads, with none of their weights made up.

transformers fills a parameter that a checkpoint lacks with random numbers, and takes integers for weights where nothing says
that they are quantised: both with no more than a warning.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers

from radixkv.errors import ModelLoadError

# Last parts of names of tensors that the weights of a quantised module are made of, in formats that keep its ``weight``.
_OF_QUANTISED = re.compile(r"weight_scale(_inv|_2)?|scales")


def model_class(config: Any) -> Any:
    """The class by which transformers makes a configuration's model: of text alone, or of text and images."""
    is_with_images = type(config) in transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    if is_with_images and type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


def load_whole(
    folder: str, dtype: torch.dtype, config: Any, gguf_file: str | None = None
) -> transformers.PreTrainedModel:
    """What transformers loads, with all weights in memory.

    Args:
        folder: of the model.
        dtype: of the model.
        config: of the model.
        gguf_file: name of a GGUF file in the folder, to be loaded; None: its checkpoint.

    Raises:
        ModelLoadError: parameters of the model are not in its files, or in another shape; or its weights are quantised and
            its configuration does not say so.
        OSError, ValueError, KeyError: as transformers raises them.
    """
    model, info = model_class(config).from_pretrained(
        folder,
        dtype=dtype,
        output_loading_info=True,
        gguf_file=gguf_file,
        config=config,
        # `read_own_generation_config` reads the model's own.
        generation_config=transformers.GenerationConfig.from_model_config(config),
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    source = folder if gguf_file is None else str(Path(folder) / gguf_file)
    missing, unexpected = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    scales = [name for name in unexpected if _OF_QUANTISED.fullmatch(name.rpartition(".")[2])]
    for name, given, expected in sorted(info["mismatched_keys"]):
        raise ModelLoadError(f"{source}: {name}: expected shape {[*expected]}, got {[*given]}")
    if missing:
        others = f"; it has {unexpected[0]}, which is no parameter of the model" if unexpected else ""
        raise ModelLoadError(
            f"{source}: expected all weights of a {type(model).__name__}, got none for {len(missing)} of its parameters, "
            f"{missing[0]} among them{others}"
        )
    if scales and getattr(model, "hf_quantizer", None) is None:
        raise ModelLoadError(
            f"{source}: expected weights that are not quantised, as its configuration has no quantization_config, "
            f"got {scales[0]}"
        )
    loaded: transformers.PreTrainedModel = model
    return loaded
