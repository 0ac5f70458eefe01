"""The files of a model on the hub, in the hub's cache on this machine."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import huggingface_hub
from safetensors import SafetensorError

from radixkv.model.weights.paths import OF_TORCH, SAFETENSORS, names_in

# Configurations, indices of weights, tokenizers and chat templates.
_TEXTS = ("*.json", "*.txt", "*.jinja", "*.model", "*.tiktoken", "*.bpe")


def fetch(model: str, with_weights: bool) -> Path:
    """Fetch what is missing of a model's newest revision, and return its folder, which is named after the revision.

    If the hub cannot be reached, this is the newest revision that was fetched before.

    Args:
        model: id on the hub.
        with_weights: fetch weights, too, in one format: safetensors if there are any. An ingress needs only the rest.

    Raises:
        Exception: of any class; the hub has no such model, refuses it or cannot be reached; or files are missing here then.
    """
    folder = Path(huggingface_hub.snapshot_download(model, allow_patterns=[*_TEXTS]))
    if with_weights:
        _fetch_weights(model, folder)
    return folder


def _fetch_weights(model: str, folder: Path) -> None:
    """Fetch the weights that would be loaded, see `radixkv.model.weights.paths`, but no copies in other formats."""
    for single, index in (SAFETENSORS, OF_TORCH):
        names = [single]
        with suppress(FileNotFoundError, SafetensorError):  # reading the weights raises the error for a damaged one
            names += names_in(folder / index)
        _fetch_files(model, folder, names)
        if any((folder / name).exists() for name in names):
            return
    _fetch_files(model, folder, ["*.safetensors"])


def _fetch_files(model: str, folder: Path, names: list[str]) -> None:
    # A warning says where nothing matches, but the configuration always does.
    huggingface_hub.snapshot_download(model, revision=folder.name, allow_patterns=["config.json", *names])
