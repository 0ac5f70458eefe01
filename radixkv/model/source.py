"""Finds a model's files, and reports errors where they are missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import huggingface_hub

from radixkv.errors import ModelLoadError, first_line, one_line
from radixkv.model.default_model import find_default_model, is_default_model
from radixkv.model.gguf.conversion import ensure_converted
from radixkv.model.hub import fetch
from radixkv.model.weights.paths import OF_TORCH, SAFETENSORS

_EXPECTED = "expected a hub id that can be reached, a folder with a transformers model, or a .gguf file"


class ModelFolder(NamedTuple):
    """Where a model's files are on this machine.

    Attributes:
        path: of the folder.
        revision: on the hub, that the files are of; None: they are not from the hub.
    """

    path: Path
    revision: str | None = None


def resolve_folder(model: str | Path | None, in_blocks: bool = False, with_weights: bool = True) -> ModelFolder:
    """The folder that a model is loaded from; a GGUF file is converted to one first, a model on the hub is fetched.

    Args:
        model: hub id, folder or GGUF file; None, or its name: the default model.
        in_blocks: of the default model, see `ensure_converted`.
        with_weights: whether they are fetched from the hub, too.

    Raises:
        ModelLoadError: there is no such model.
        TypeError: it is something else.
    """
    if is_default_model(model):
        return ModelFolder(ensure_converted(find_default_model(), _print_progress, in_blocks))
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model: {_EXPECTED}, or a loaded transformers model, got {model!r:.80}")
    path = Path(model)
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _missing(model, f"the folder has no config.json{_hint(path)}")
        return ModelFolder(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise _missing(model, "there is no such file")
        return ModelFolder(ensure_converted(path, _print_progress, in_blocks=True))
    if path.exists():
        raise _missing(model, "it is a file: give its folder")
    if path.is_absolute() or str(model).startswith(".") or str(model).count("/") > 1:
        raise _missing(model, "there is no such folder")
    path = _fetch(str(model), with_weights)
    if with_weights and not (path / "config.json").is_file():
        raise _missing(model, f"{path} has no config.json{_hint(path)}")
    return ModelFolder(path, path.name)


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """What reading a model's files raises becomes a `ModelLoadError` that names the model."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if needs_code(error):
            raise ModelLoadError(f"{name}: it needs code that comes with it, which is never run here") from error
        raise ModelLoadError(
            f"{name}: could not be loaded ({first_line(error)}){_hint(Path(name))}; {_EXPECTED}"
        ) from error
    except ImportError as error:
        reason = one_line(str(error))
        raise ModelLoadError(f"{name}: could not be loaded, for a package is missing: {reason}") from error


def needs_code(error: Exception) -> bool:
    """Whether transformers refused to run code that comes with a model; without an argument for that, it asks the user."""
    return "trust_remote_code" in str(error)


def _print_progress(message: str) -> None:
    """Say on standard error what takes long."""
    print(f"radixkv: {message}", file=sys.stderr, flush=True)


def _fetch(model: str, with_weights: bool) -> Path:
    try:
        if not isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
            huggingface_hub.HfApi().model_info(model, timeout=10)  # `fetch` would wait for minutes
            _print_progress(f"fetching {model} from the hub")
        return fetch(model, with_weights)
    except Exception as error:  # of any class: there is no model to load
        reason = one_line(str(error))
        raise _missing(model, f"neither a folder here nor a model on the hub that can be reached ({reason})") from error


def _hint(folder: Path) -> str:
    """What to do with a folder that holds no weights of a model; empty: it does, or that is not known."""
    has_weights = any((folder / name).is_file() for name in (*SAFETENSORS, *OF_TORCH))
    is_adapter = (folder / "adapter_config.json").is_file() and not has_weights
    return "; merge the adapter in it into its base model" if is_adapter else ""


def _missing(model: str | Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"model: {_EXPECTED}, got {str(model)!r}: {reason}")
