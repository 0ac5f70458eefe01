"""A GGUF file as a folder that transformers reads a configuration and a tokenizer from, with its weights in their own blocks.

Only rows change places, where GGUF orders those of a matrix in another way than transformers does, whose own converter says
so. What it changes in other ways, such as norms that one is added to, is converted as floats.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import AutoConfig, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)

from radixkv.errors import ModelLoadError
from radixkv.model.deferred_weights import build_without_weights
from radixkv.model.gguf_conversion import BLOCKS_FILE, NotInBlocksError
from radixkv.model.gguf_rotation import apply_scaling


def write_folder(path: Path, folder: Path) -> None:
    """Write the folder of a GGUF file.

    Args:
        path: of the file.
        folder: to be made.

    Raises:
        ModelLoadError: rotary embeddings are scaled in a way that is not read; or there are biases that the model lacks.
        NotInBlocksError: a parameter is in no tensor of the file alone, as with experts, or not in that shape.
        OSError, ValueError, KeyError, RuntimeError, NotImplementedError: the file cannot be read, as transformers says it.
    """
    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    reader = gguf.GGUFReader(path)
    apply_scaling(reader, config)
    model = build_without_weights(config, torch.float32)
    parsed = load_gguf_checkpoint(str(path))["config"]
    processor = TENSOR_PROCESSORS.get(_architecture(reader), TensorProcessor)(config=parsed)
    names = get_gguf_hf_weights_map(model, processor)
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    for tensor in reader.tensors:
        name = names.get(tensor.name)
        if name not in shapes:
            continue
        order = _row_order(processor, tensor)
        if order is None:
            floats = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
            tensors[name] = torch.from_numpy(np.array(floats))
            shape = list(floats.shape)
        else:
            tensors[name], kinds[name] = torch.from_numpy(tensor.data[order]), tensor.tensor_type.name
            shape = tensor.shape[::-1].tolist()
        if shape != shapes[name]:
            raise NotInBlocksError(f"{tensor.name} has shape {shape}, but {name} {shapes[name]}")
    missing = sorted({*_saved_names(model)} - {*tensors})
    if missing:
        raise NotInBlocksError(f"{missing[0]} is not a tensor of its own there")
    unread = [tensor for tensor in reader.tensors if tensor.name.endswith(".bias") and tensor.name not in names]
    for tensor in unread:
        if gguf.dequantize(tensor.data, tensor.tensor_type).any():
            kind = type(model).__name__
            raise ModelLoadError(f"{tensor.name}: expected no such tensor of a {kind}, which has no biases there")
    folder.mkdir()
    save_file(tensors, folder / BLOCKS_FILE, {"kinds": json.dumps(kinds)})
    config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(folder)


def _architecture(reader: gguf.GGUFReader) -> str:
    field = reader.fields["general.architecture"]
    return str(bytes(field.parts[field.data[0]]), "utf-8")


def _row_order(processor: Any, tensor: Any) -> NDArray[np.int64] | None:
    """The rows of a quantised matrix in the order in which transformers has them; None: they are not just reordered."""
    if len(tensor.shape) != 2 or tensor.data.dtype != np.uint8:
        return None
    rows = len(tensor.data)
    # Two columns, so that a transposed matrix has another shape.
    numbered = np.stack([np.arange(rows), np.arange(rows)], axis=1)
    processed = processor.process(numbered.copy(), tensor.name).weights
    if processed.shape != numbered.shape or not np.array_equal(np.sort(processed, axis=0), numbered):
        return None
    order: NDArray[np.int64] = processed[:, 0]
    return order


def _saved_names(model: torch.nn.Module) -> list[str]:
    """Of what a model saves, of parameters that are tied the first."""
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), name)
    return [*seen.values()]
