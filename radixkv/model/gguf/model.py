"""The model that a GGUF file describes, before any of its weights is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import torch
import transformers
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from radixkv.model.gguf.conversion import UnreadableGgufError
from radixkv.model.gguf.fields import Fields, apply_fields, check_rotary_dim
from radixkv.model.gguf.rotation import apply_scaling, is_rotation
from radixkv.model.supported import check_supported, has_recurrent_layers
from radixkv.model.weights.deferred import build_without_weights

# Prefixes of the tensors for images and audio beside a model of text.
_OTHER_MODALITIES = ("v.", "a.", "mm.")


@dataclass(frozen=True)
class GgufModel:
    """What is known of a GGUF file's model without its weights.

    Attributes:
        reader: of the file.
        config: of the model, with all that the file says.
        model: of that configuration, without weights.
        processor: transformers', which undoes what llama.cpp's converter does to tensors.
        names: of the model's parameters, by those of the file's tensors.
    """

    reader: gguf.GGUFReader
    config: Any
    model: transformers.PreTrainedModel
    processor: Any
    names: dict[str, str]


def describe(path: Path) -> GgufModel:
    """Read all of a GGUF file but its weights, and refuse it if its model would compute something else here.

    Raises:
        UnreadableGgufError: the file is one of several, says something that is not read, or has tensors that the model lacks.
        UnsupportedModelError: the model cannot run over KV cache blocks.
        OSError, ValueError, KeyError, RuntimeError, NotImplementedError: the file cannot be read, as transformers says it.
    """
    reader = gguf.GGUFReader(path)
    _check_whole(reader)
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    fields = Fields(reader)
    if has_recurrent_layers(config):
        raise UnreadableGgufError(
            f"general.architecture: expected a model without recurrent layers, got {fields.architecture!r}"
        )
    apply_fields(fields, config)
    apply_scaling(reader, fields, config)
    model = build_without_weights(config, torch.float32)
    check_supported(model, str(path))
    check_rotary_dim(fields, model)
    parsed = load_gguf_checkpoint(str(path))["config"]
    # In the form that the processor of attention heads takes.
    processor = TENSOR_PROCESSORS.get(fields.architecture, TensorProcessor)(config=parsed)
    names = get_gguf_hf_weights_map(model, processor)
    _check_unread(reader, model, names)
    return GgufModel(reader, config, model, processor, names)


def _check_whole(reader: gguf.GGUFReader) -> None:
    """Refuse one of several files that a model was split into: without an output head, say, it would be another model.

    Raises:
        UnreadableGgufError: says how to join them.
    """
    count = reader.fields.get("split.count")
    if count is not None and count.contents() > 1:
        raise UnreadableGgufError(
            f"split.count: expected a model in one file, got one of {count.contents()}; llama-gguf-split --merge joins them"
        )


def _check_unread(reader: gguf.GGUFReader, model: transformers.PreTrainedModel, names: dict[str, str]) -> None:
    """Refuse a file with tensors that are no parameters of the model, unless they change nothing.

    Raises:
        UnreadableGgufError: names one.
    """
    for tensor in reader.tensors:
        # transformers names tensors of experts without the last part.
        if tensor.name in names or tensor.name.removesuffix(".weight") in names or is_rotation(tensor.name):
            continue
        if tensor.name.startswith(_OTHER_MODALITIES):
            continue
        neutral = {"bias": 0.0, "scale": 1.0}.get(tensor.name.rpartition(".")[2])
        if neutral is None or (gguf.dequantize(tensor.data, tensor.tensor_type) != neutral).any():
            kind = type(model).__name__
            what = "has no biases there" if neutral == 0 else "has no parameter for it"
            raise UnreadableGgufError(f"{tensor.name}: expected no such tensor of a {kind}, which {what}")
