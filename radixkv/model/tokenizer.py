"""A model's tokenizer, and how its answers are read: all of a model that an ingress loads.

Nothing here uses torch, unless a GGUF file has to be converted first; transformers imports it where it is to be found
(`radixkv.model.without_torch`).
"""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import transformers
import xxhash

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, first_line
from radixkv.model.chat_templates import ChatTemplate, with_template
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.model.silence import silence_transformers
from radixkv.model.source import load_errors, needs_code, resolve_folder
from radixkv.model.text_interface import TextInterface
from radixkv.tools.chat_format import ChatFormat

_log = logging.getLogger(__name__)

# Files of a tokenizer: those that are JSON objects, and those that may hold its vocabulary.
_JSON_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_VOCABULARIES = ("tokenizer.json", "vocab.*", "tekken.json", "*.model", "*.tiktoken", "*.bpe")


def load_tokenizer(model: str | Path | None = None) -> Any:
    """A model's tokenizer alone; None: the default model's.

    Raises:
        ModelLoadError: it does not exist or cannot be read.
    """
    name = DEFAULT_MODEL_NAME if model is None else str(model)
    # A folder may hold a tokenizer and nothing else.
    alone = bool(model) and Path(str(model)).is_dir()
    with silence_transformers(), load_errors(name):
        folder = Path(str(model)) if alone else resolve_folder(model, with_weights=False).path
        tokenizer = read_tokenizer(folder)
    if tokenizer is None:
        raise ModelLoadError(f"{name}: there is no tokenizer in {folder}")
    return tokenizer


def read_tokenizer(folder: Path) -> Any:
    """The tokenizer of a model; None: its folder has none, or one without its vocabulary.

    Raises:
        ModelLoadError: it cannot be read; the message names the file.
        ImportError: a package is missing.
        ValueError: it needs code of its own.
    """
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except ImportError:
        raise
    except Exception as error:  # tokenizers has no class of its own; of a file of other contents, any can come
        if needs_code(error):
            raise
        damaged = _damaged_file(folder)
        if damaged is None:
            return None  # without a tokenizer, the model serves token ids
        raise ModelLoadError(
            f"{damaged}: expected a part of a tokenizer, it cannot be read ({first_line(error)})"
        ) from error
    # Of many classes, transformers makes one without a vocabulary, which has a few special tokens alone.
    is_made_up = hasattr(tokenizer, "backend_tokenizer") and _vocabulary(folder) is None
    return None if is_made_up else tokenizer


def _damaged_file(folder: Path) -> Path | None:
    """The file on account of which a folder's tokenizer cannot be read; None: it has no vocabulary.

    It is the first that holds other than a JSON object and should, else the vocabulary.
    """
    for path in (folder / name for name in _JSON_FILES):
        try:
            contents = json.loads(path.read_bytes())
        except FileNotFoundError:
            continue
        except ValueError:
            return path
        if not isinstance(contents, dict):
            return path
    return _vocabulary(folder)


def _vocabulary(folder: Path) -> Path | None:
    """The file with a tokenizer's vocabulary; None: there is none."""
    return next((path for pattern in _VOCABULARIES for path in sorted(folder.glob(pattern))), None)


def warn_of_tokens_beyond(vocab_size: int, tokenizer: Any, name: str) -> None:
    """Write a warning to the log where a tokenizer has tokens that a model has not.

    Of added tokens, those count that begin or end texts, or that the chat template writes: models that read text alone, such
    as the smallest of Gemma 3, are published with a token of images beyond their vocabulary.

    Args:
        vocab_size: of the model.
        tokenizer: None: there is none.
        name: of the model.
    """
    ends = [getattr(tokenizer, "bos_token", None), getattr(tokenizer, "eos_token", None)]
    template = str(getattr(tokenizer, "chat_template", None))
    added = getattr(tokenizer, "added_tokens_decoder", {}).items()
    used = [token_id for token_id, token in added if token.content in ends or token.content in template]
    last = max([getattr(tokenizer, "vocab_size", 0) - 1, *used])
    if last >= vocab_size:
        _log.warning(
            "%s: its tokenizer has tokens up to %d, %r, its vocabulary up to %d: prompts with others are refused, and no "
            "answer ends with them",
            name,
            last,
            tokenizer.convert_ids_to_tokens(last),
            vocab_size - 1,
        )


def chosen_tokenizer(config: ModelConfig, read_own: Callable[[], Any]) -> Any:
    """The tokenizer to use with a model, with the chat template that is configured; None: there is none.

    Args:
        config: its ``tokenizer`` and ``chat_template``.
        read_own: reads the model's own.

    Raises:
        ModelLoadError: the tokenizer does not exist or cannot be read.
        TypeError: it is an object of another kind.
        ValueError: ``chat_template`` is neither a file nor a template, or there is no tokenizer to use it.
    """
    tokenizer = config.tokenizer
    if tokenizer is None:
        tokenizer = read_own()
    elif isinstance(tokenizer, str | Path):
        try:
            tokenizer = load_tokenizer(tokenizer)
        except ModelLoadError as error:
            raise ModelLoadError(f"tokenizer: {str(error).removeprefix('model: ')}") from error
    elif not (callable(tokenizer) and hasattr(tokenizer, "convert_ids_to_tokens")):
        raise TypeError(f"tokenizer: expected one of transformers, or its hub id or folder, got {tokenizer!r:.80}")
    if config.chat_template is None:
        return tokenizer
    return copy.deepcopy(
        with_template(tokenizer, ChatTemplate.read(config.chat_template))
    )  # the caller may use it elsewhere


_Text = TypeVar("_Text", bound=TextInterface)


def with_chat_template(loaded: _Text, template: str | Path | None) -> _Text:
    """The same model with conversations written by another chat template, and answers read as that one says.

    Args:
        loaded: stays as it is.
        template: Jinja, or a file of it; None: the model's own.

    Raises:
        ValueError: it is neither, or there is no tokenizer to use it.
    """
    if template is None:
        return loaded
    parsers = () if loaded.chat_format is None else loaded.chat_format.parsers
    tokenizer, chat_format = loaded.request_templates.of(loaded.tokenizer, ChatTemplate.read(template), *parsers)
    return replace(loaded, tokenizer=tokenizer, chat_format=chat_format)


def chat_format_of(tokenizer: Any, config: ModelConfig) -> ChatFormat | None:
    """How answers to conversations are written; None: there is no chat template."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    return ChatFormat.of(tokenizer, config.tool_call_parser, config.reasoning_parser)


def tokenizer_digest(tokenizer: Any) -> str:
    """A name for how a tokenizer splits texts into tokens; None has one, too.

    Args:
        tokenizer: of transformers. Of one without a fast backend, its class and vocabulary count.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        for state in ("truncation", "padding"):  # of its last use
            rules.pop(state, None)
    elif tokenizer is not None:
        rules = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    else:
        rules = None
    return xxhash.xxh3_64_hexdigest(json.dumps(rules, sort_keys=True).encode())
