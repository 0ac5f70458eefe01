"""A model's tokenizer, and how its answers are read: all of a model that an ingress loads.

Nothing here uses torch, unless a GGUF file has to be converted first; transformers imports it where it is to be found
(`radixkv.model.without_torch`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import logging as transformers_logging

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.model.source import load_errors, print_progress, resolve_folder
from radixkv.tools.chat_format import ChatFormat


def load_tokenizer(model: str | Path | None = None) -> Any:
    """A model's tokenizer alone; None: the default model's.

    Raises:
        ModelLoadError: it does not exist or cannot be read.
    """
    name = DEFAULT_MODEL_NAME if model is None else str(model)
    folder = resolve_folder(model, print_progress)
    with silence_transformers(), load_errors(name):
        tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise ModelLoadError(f"{name}: there is no tokenizer in {folder}")
    return tokenizer


def read_tokenizer(folder: str) -> Any:
    """The tokenizer of a model; None: its folder has none.

    Args:
        folder: or the id on the hub.

    Raises:
        OSError, ValueError: the model on the hub has none, or it cannot be read.
    """
    try:
        return transformers.AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError):
        if not Path(folder).is_dir():
            raise
        return None  # without a tokenizer, the model serves token ids


def chat_format_of(tokenizer: Any, config: ModelConfig) -> ChatFormat | None:
    """How answers to conversations are written; None: there is no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return ChatFormat.of(tokenizer, config.tool_call_parser, config.reasoning_parser)


@contextmanager
def silence_transformers() -> Iterator[None]:
    """No progress bars or warnings from transformers while a model loads."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        transformers_logging.enable_progress_bar()
