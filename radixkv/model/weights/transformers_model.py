"""Models that transformers loads, with none of their weights made up.

transformers fills a parameter that a checkpoint lacks with random numbers, and takes integers for weights where nothing says
that they are quantised: both with no more than a warning.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from radixkv.errors import ModelLoadError, UnsupportedModelError
from radixkv.model.weights.paths import torch_files_of

_log = logging.getLogger(__name__)

# Names of the scales that formats store beside a quantised ``weight``.
_OF_QUANTISED = re.compile(r"weight_scale(_inv|_2)?|scales")
# Causal masks, which checkpoints of GPT-2, GPT-Neo and their like hold beside their weights.
_MASK = re.compile(r"(.*\.)?attn\.(attention\.)?(masked_)?bias")


def model_class(config: Any) -> Any:
    """The class by which transformers makes a configuration's model: of text alone, or of text and images or audio.

    Raises:
        UnsupportedModelError: there is none.
    """
    kind = type(config)
    of_text, of_more = transformers.MODEL_FOR_CAUSAL_LM_MAPPING, transformers.MODEL_FOR_MULTIMODAL_LM_MAPPING
    if kind in of_text and not (kind in of_more and _finds_no_part(of_text[kind], kind)):
        return transformers.AutoModelForCausalLM
    if kind in of_more:
        return transformers.AutoModelForMultimodalLM
    if hasattr(config, "auto_map"):  # what comes with code of its own is refused by the class
        return transformers.AutoModelForCausalLM
    raise UnsupportedModelError(
        f"{config.name_or_path}: expected a model that generates text from the text before it, got {config.model_type!r}"
    )


def _finds_no_part(of_text: Any, config_class: type) -> bool:
    """Whether a class of text alone, made of a part of a configuration, reads no checkpoint of the whole, as Emu 3's.

    Those that do are named as the part that they are (``language_model``).
    """
    return of_text.config_class is not config_class and of_text.base_model_prefix == "model"


def load_whole(
    folder: Path, dtype: torch.dtype, config: Any, gguf_file: str | None = None
) -> transformers.PreTrainedModel:
    """What transformers loads, with all weights in memory; a warning names what the files have besides.

    Args:
        folder: of the model.
        dtype: of the model.
        config: of the model.
        gguf_file: name of a GGUF file in the folder, to be loaded; None: its checkpoint.

    Raises:
        ModelLoadError: parameters of the model are not in its files, or in another shape; or its weights are quantised and
            its configuration does not say so.
        UnsupportedModelError: see `model_class`.
        OSError, ValueError, KeyError: as transformers raises them.
    """
    model, info = model_class(config).from_pretrained(
        str(folder),
        dtype=dtype,
        output_loading_info=True,
        gguf_file=gguf_file,
        config=config,
        # `read_own_generation_config` reads the model's own.
        generation_config=transformers.GenerationConfig.from_model_config(config),
        ignore_mismatched_sizes=True,
        trust_remote_code=False,
    )
    _check_loaded(model, config, info, folder if gguf_file is None else folder / gguf_file)
    loaded: transformers.PreTrainedModel = model
    return loaded


def _check_loaded(model: transformers.PreTrainedModel, config: Any, info: Mapping[str, Any], source: Path) -> None:
    """Refuse a model whose weights are not all those of its files; a warning names tensors that are left out.

    Args:
        config: of the files. If the model is made of the part of it that reads text, other parts are left out silently.
        info: transformers' report on the loading.
        source: the folder or the file that was loaded.
    """
    missing = sorted(info["missing_keys"])
    unexpected = sorted(name for name in info["unexpected_keys"] if not _MASK.fullmatch(name))
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
    if type(model.config) is not type(config):
        unexpected = [name for name in unexpected if name.startswith(f"{model.base_model_prefix}.")]
    if unexpected:
        _log.warning(
            "%s: %d of its tensors are left out, for they are no parameters of a %s, %s among them",
            source,
            len(unexpected),
            type(model).__name__,
            unexpected[0],
        )


def refuse_integers(folder: Path, integers: Mapping[str, str], model: transformers.PreTrainedModel) -> None:
    """Refuse integers in place of weights: they are codes, and nothing says how to decode them.

    Args:
        folder: of the model.
        integers: the tensors that are not floats, with their types.
        model: whose weights they may be.

    Raises:
        ModelLoadError: names a tensor.
    """
    is_floating = {name: tensor.is_floating_point() for name, tensor in model.state_dict().items()}
    for name, kind in integers.items():
        # Names that are not the model's own are of buffers that it no longer has, or transformers translates them.
        if is_floating.get(name, name.endswith(".weight")):
            raise ModelLoadError(
                f"{folder}: {name}: expected floats, as its configuration has no quantization_config, got {kind}"
            )


def integers_of_torch(folder: Path) -> dict[str, str]:
    """The tensors that are not floats in a checkpoint in torch's own format, with their types.

    Raises:
        OSError, SafetensorError: an index cannot be read; the latter names it.
        UnpicklingError, RuntimeError: a file cannot be read.
    """
    found: dict[str, str] = {}
    for path in torch_files_of(folder):
        tensors: dict[str, torch.Tensor] = torch.load(path, map_location="meta", weights_only=True)
        found |= {name: str(each.dtype) for name, each in tensors.items() if not each.is_floating_point()}
    return found
