"""A name for everything of a model that its keys and values depend on."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
import xxhash
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from radixkv.model.native import weights_of
from radixkv.model.replacement.packed_linear import PackedLinear
from radixkv.model.weights.deferred import DeferredWeights

# Attribute of a model whose weights have been repacked: its name, and the digest of the tensors that it has left.
_ATTRIBUTE = "radixkv_fingerprint"
# Fields of a configuration that say where it came from, and not what is computed.
_WITHOUT = frozenset({"_name_or_path", "transformers_version", "architectures", "torch_dtype", "dtype"})


def model_fingerprint(
    model: transformers.PreTrainedModel, quantization: str | None, deferred: DeferredWeights | None = None
) -> str:
    """Names a model by its weights (bytes, types and shapes), its configuration, and how its weights will be quantised.

    The digest is 128 bits of xxh3, which runs at memory speed. It is not cryptographic: the weights of two models can
    be made to collide.

    It is computed anew for each engine, because weights may be changed in place, as long as they are not repacked.

    Args:
        model: not yet prepared for a CPU, which repacks the weights; or `remember_fingerprint` was called when it was.
        quantization: as in `ModelConfig`.
        deferred: the model's weights, where they are not in memory.

    Raises:
        ValueError: the model was prepared without having been named, or has been changed since; or a weight is of a class of
            its own, whose bytes are not known.
    """
    for name, parameter in model.named_parameters():
        if is_traceable_wrapper_subclass(parameter):
            raise ValueError(
                f"model: its weights cannot be named: {name}: expected a tensor of torch's own class, got a "
                f"{type(parameter).__name__}"
            )
    if not _is_repacked(model):
        return f"{tensors_digest(model, deferred)}:{quantization}"
    named, left = getattr(model, _ATTRIBUTE, (None, None))
    if named is None:
        raise ValueError(
            "model: its weights cannot be named, because an LLM without tiers has repacked them: load it again"
        )
    if left != tensors_digest(model):
        raise ValueError(
            "model: its weights cannot be named, because they were changed after an LLM had repacked them: load it again"
        )
    return f"{named}:{quantization}"


def remember_fingerprint(model: transformers.PreTrainedModel, fingerprint: str) -> None:
    """Keep the name of a model whose weights have just been repacked, for the next engine that it is given to.

    Args:
        model: prepared.
        fingerprint: from `model_fingerprint`, before that.
    """
    if _is_repacked(model):
        setattr(model, _ATTRIBUTE, (fingerprint.rpartition(":")[0], tensors_digest(model)))


def _is_repacked(model: transformers.PreTrainedModel) -> bool:
    return bool(weights_of(model)) or any(isinstance(module, PackedLinear) for module in model.modules())


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The files that a model is loaded from, by which it can be named later: only then are they read.

    Attributes:
        folder: of the model.
        state: size and time of the last change of each file, by its name.
    """

    folder: Path
    state: dict[str, tuple[int, int]]

    @classmethod
    def of(cls, folder: Path) -> ModelFiles:
        """The files as they are now.

        Raises:
            OSError: the folder cannot be read.
        """
        return cls(folder, _state_of(folder))

    def digest(self) -> str | None:
        """Names the model by the bytes of its weights and its configuration; None: they have been changed since.

        Raises:
            OSError: a file cannot be read.
        """
        digest = xxhash.xxh3_128()
        try:
            for path in _files_of(self.folder):
                digest.update(path.name.encode())
                with path.open("rb") as file:
                    while part := file.read(1 << 24):
                        digest.update(part)
            return digest.hexdigest() if _state_of(self.folder) == self.state else None
        except FileNotFoundError:
            return None


def _files_of(folder: Path) -> list[Path]:
    """Those that say what is computed; links that lead nowhere, as to weights in another format, do not."""
    return sorted(
        path for path in folder.iterdir() if path.suffix in (".safetensors", ".bin", ".json") and path.is_file()
    )


def _state_of(folder: Path) -> dict[str, tuple[int, int]]:
    states = ((path.name, path.stat()) for path in _files_of(folder))
    return {name: (state.st_size, state.st_mtime_ns) for name, state in states}


@torch.inference_mode()
def tensors_digest(model: transformers.PreTrainedModel, deferred: DeferredWeights | None = None) -> str:
    """Names a model by its configuration and the bytes of its tensors, as far as no native code has repacked them.

    Args:
        model: in memory, but for its weights.
        deferred: where its weights are; None: in memory.
    """
    configuration: dict[str, Any] = {
        name: value for name, value in model.config.to_dict().items() if name not in _WITHOUT
    }
    digest = xxhash.xxh3_128(json.dumps(configuration, sort_keys=True, default=str).encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(f"{name}:{tensor.dtype}:{list(tensor.shape)}".encode())
        if deferred is not None:
            tensor = deferred.read(tensor)
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
