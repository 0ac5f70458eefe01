"""A folder's model, with its weights in memory, or in files until they are wanted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from radixkv.model.default_model import BLOCKS_FILE
from radixkv.model.deferred_weights import (
    BlockFile,
    CheckpointFiles,
    DeferredWeights,
    build_without_weights,
)


def read_checkpoint(
    folder: str, dtype: torch.dtype, device: torch.device, may_defer: bool
) -> tuple[transformers.PreTrainedModel, DeferredWeights | None]:
    """Build a model, and read its weights if they are to be in memory.

    On a CPU, where compiled code packs weights one module at a time, they are read then, so that a file in another type is
    never in memory whole. That is done with what a GGUF file was converted to, and with folders of
    safetensors that have a tensor for each parameter; all others are loaded as transformers does it.

    Args:
        folder: of the model, or a hub id.
        dtype: of the model.
        device: of the model.
        may_defer: whether weights may stay in files.

    Returns:
        The model, and where its weights are; None: they are in memory.

    Raises:
        OSError, ValueError, KeyError: as transformers raises them.
    """
    path = Path(folder)
    is_in_blocks = (path / BLOCKS_FILE).exists()
    found = None
    if is_in_blocks:
        model = build_without_weights(transformers.AutoConfig.from_pretrained(folder), dtype)
        found = model, DeferredWeights(model, BlockFile(path))
    elif may_defer and device.type == "cpu" and path.is_dir():
        found = _defer(path, dtype)
    if found is None:
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device), None
    model, deferred = found
    if (path / "generation_config.json").exists():
        model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    if may_defer and device.type == "cpu":
        return model, deferred
    deferred.fill(model)
    moved: Any = model.to(device)
    return moved, None


def _defer(folder: Path, dtype: torch.dtype) -> tuple[transformers.PreTrainedModel, DeferredWeights] | None:
    """None: the folder's tensors are not the model's parameters one by one."""
    config = transformers.AutoConfig.from_pretrained(folder)
    if getattr(config, "quantization_config", None) is not None:
        return None
    try:
        files = CheckpointFiles(folder)
    except (OSError, SafetensorError):
        return None
    model = build_without_weights(config, dtype)
    keeps_float32 = model._keep_in_fp32_modules or model._keep_in_fp32_modules_strict
    if (keeps_float32 and dtype != torch.float32) or not files.holds(model):
        return None
    return model, DeferredWeights(model, files)
