"""A GGUF file as a folder that transformers reads a configuration and a tokenizer from, with its weights in their own blocks.

Weights stay as they are, but for the order of rows, which is changed as transformers' own converter changes it. What this
converter changes in other ways, such as norms that one is added to, is converted as floats.
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
from transformers import AutoTokenizer

from radixkv.model.gguf.conversion import BLOCKS_FILE, NotInBlocksError
from radixkv.model.gguf.model import describe


def write_folder(path: Path, folder: Path) -> None:
    """Write the folder of a GGUF file.

    Args:
        path: of the file.
        folder: to be made.

    Raises:
        UnreadableGgufError, UnsupportedModelError: see `radixkv.model.gguf.model.describe`.
        NotInBlocksError: a parameter is in no tensor of the file alone, as with experts, or not in that shape.
        OSError, ValueError, KeyError, RuntimeError, NotImplementedError: the file cannot be read, as transformers says it.
    """
    described = describe(path)
    model, processor, names = described.model, described.processor, described.names
    shapes = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    missing = sorted({*_saved_names(model)} - {names.get(tensor.name) for tensor in described.reader.tensors})
    if missing:
        raise NotInBlocksError(f"{missing[0]} is not a tensor of its own there")
    tensors: dict[str, torch.Tensor] = {}
    kinds: dict[str, str] = {}
    for tensor in described.reader.tensors:
        name = names.get(tensor.name)
        if name is None or name not in shapes:
            continue
        order = _row_order(processor, tensor)
        if order is None:
            floats = processor.process(gguf.dequantize(tensor.data, tensor.tensor_type), tensor.name).weights
            tensors[name] = torch.from_numpy(np.array(floats))
            shape = list(floats.shape)
        else:
            tensors[name], kinds[name] = torch.from_numpy(tensor.data[order].view(np.uint8)), tensor.tensor_type.name
            shape = tensor.shape[::-1].tolist()
        if shape != shapes[name]:
            raise NotInBlocksError(f"{tensor.name} has shape {shape}, but {name} {shapes[name]}")
    folder.mkdir()
    save_file(tensors, folder / BLOCKS_FILE, {"kinds": json.dumps(kinds)})
    described.config.save_pretrained(folder)
    if model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name, trust_remote_code=False)
    tokenizer.save_pretrained(folder)


def _row_order(processor: Any, tensor: Any) -> NDArray[np.int64] | None:
    """The rows of a matrix in the order in which transformers has them; None: they are in float32, or not just reordered."""
    if len(tensor.shape) != 2 or tensor.data.dtype not in (np.uint8, np.float16):
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
    """Names of what a model saves; where parameters are tied, the first one's."""
    seen: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        seen.setdefault(id(tensor), name)
    return [*seen.values()]
