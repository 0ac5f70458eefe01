"""Finds a model's files, and reports errors where they are missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import huggingface_hub

from radixkv.errors import ModelLoadError
from radixkv.model.default_model import find_default_model, is_default_model
from radixkv.model.gguf_conversion import ProgressCallback, ensure_converted

_EXPECTED = "expected a hub id that can be reached, a folder with a transformers model, or a .gguf file"


def resolve_folder(model: str | Path | None, progress: ProgressCallback, in_blocks: bool = False) -> str:
    """The folder, or the id on the hub, that transformers loads a model from; a GGUF file is converted to a folder first.

    Args:
        model: hub id, folder or GGUF file; None, or its name: the default model.
        progress: called with a message before a slow operation.
        in_blocks: of the default model, see `ensure_converted`.

    Raises:
        ModelLoadError: there is no such model.
        TypeError: it is something else.
    """
    if is_default_model(model):
        return str(ensure_converted(find_default_model(), progress, in_blocks))
    if not isinstance(model, str | os.PathLike):
        raise TypeError(f"model: {_EXPECTED}, or a loaded transformers model, got {model!r:.80}")
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise _missing(model, "there is no such file")
        return str(ensure_converted(path, progress, in_blocks=True))
    if path.is_dir() and not (path / "config.json").is_file():
        raise _missing(model, "the folder has no config.json")
    if not path.exists() and (path.is_absolute() or str(model).startswith(".") or str(model).count("/") > 1):
        raise _missing(model, "there is no such folder")
    if not path.exists():
        _check_hub(str(model))
    return str(model)


@contextmanager
def load_errors(name: str) -> Iterator[None]:
    """What reading a model's files raises becomes a `ModelLoadError` that names the model."""
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        if needs_code(error):
            raise ModelLoadError(f"{name}: it needs code that comes with it, which is never run here") from error
        raise ModelLoadError(f"{name}: could not be loaded ({str(error).splitlines()[0]}); {_EXPECTED}") from error
    except ImportError as error:
        reason = " ".join(str(error).split())
        raise ModelLoadError(f"{name}: could not be loaded, for a package is missing: {reason}") from error


def needs_code(error: Exception) -> bool:
    """Whether transformers refused to run code that comes with a model. Unless told not to, it asks on standard input."""
    return "trust_remote_code" in str(error)


def print_progress(message: str) -> None:
    """Say on standard error what takes long."""
    print(f"radixkv: {message}", file=sys.stderr, flush=True)


def _check_hub(model: str) -> None:
    """Ask the hub once: transformers retries every file for most of a minute before it fails."""
    try:
        if isinstance(huggingface_hub.try_to_load_from_cache(model, "config.json"), str):
            return
        huggingface_hub.HfApi().model_info(model, timeout=10)
    except Exception as error:  # of any class: there is no model to load
        reason = str(error).splitlines()[0]
        raise _missing(model, f"neither a folder here nor a model on the hub that can be reached ({reason})") from error


def _missing(model: str | Path, reason: str) -> ModelLoadError:
    return ModelLoadError(f"model: {_EXPECTED}, got {str(model)!r}: {reason}")
