"""Which files of a folder have a model's weights."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError

SAFETENSORS = ("model.safetensors", "model.safetensors.index.json")
"""What transformers looks for: a file with all weights, and the index of several."""
OF_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")
"""The same in torch's own format, which transformers loads where there are no safetensors."""


def safetensors_of(folder: Path) -> list[Path]:
    """The safetensors with a folder's weights: ``model.safetensors``, else the files that its index names.

    These are what transformers loads. If it would load nothing, a single file of another name counts.

    Raises:
        OSError, SafetensorError: an index cannot be read; the latter names the file.
    """
    single, index = (folder / name for name in SAFETENSORS)
    if single.exists():
        return [single]
    if index.exists():
        return [folder / name for name in names_in(index)]
    others = [*folder.glob("*.safetensors")]
    return others if len(others) == 1 and not any((folder / name).exists() for name in OF_TORCH) else [single]


def torch_files_of(folder: Path) -> list[Path]:
    """The files in torch's own format that transformers loads where there are no safetensors.

    Raises:
        OSError, SafetensorError: an index cannot be read; the latter names the file.
    """
    single, index = (folder / name for name in OF_TORCH)
    return [single] if single.exists() else [folder / name for name in names_in(index)]


def names_in(index: Path) -> list[str]:
    """The files that an index names, in order.

    Raises:
        OSError, SafetensorError: it cannot be read; the latter names the file.
    """
    text = index.read_text(errors="replace")
    try:
        names = sorted({*json.loads(text)["weight_map"].values()})
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        names = []
    if not names or not all(isinstance(name, str) for name in names):
        raise SafetensorError(f"{index.name}: expected a weight_map of file names, got {text!r:.80}")
    return names
