"""What a model's authors say about sampling from it, and where that is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers

from radixkv.config import ModelConfig
from radixkv.sampling_defaults import NO_DEFAULTS, SamplingDefaults, defaults_of_model, log_defaults, overridden

_FILE = "generation_config.json"


def read_generation_config(source: str) -> transformers.GenerationConfig | None:
    """The configuration that replaces the model's own; None: nothing does.

    Args:
        source: the option ``generation_config``.

    Raises:
        ValueError: there is no such file, or it cannot be read.
    """
    if source in ("auto", "vllm"):
        return None
    expected = f"generation_config: expected auto, vllm or a folder with a {_FILE}, got {source!r:.200}"
    if not (Path(source) / _FILE).is_file():
        raise ValueError(expected)
    try:
        return transformers.GenerationConfig.from_pretrained(source)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{expected} ({str(error).splitlines()[0]})") from error


def sampling_defaults_of(
    generation_config: transformers.GenerationConfig | None, config: ModelConfig, name: str
) -> SamplingDefaults:
    """What requests are sampled with that say nothing else; a line of the log says it, where there is anything.

    Args:
        generation_config: the model's, or what is used in its place.
        config: says whether it counts, and what is given in the place of its values.
        name: of the model.

    Raises:
        ValueError: nothing can be sampled with a value.
    """
    own = NO_DEFAULTS if config.generation_config == "vllm" else defaults_of_model(generation_config, name)
    defaults = overridden(own, config.generation_override)
    log_defaults(name, defaults)
    return defaults


def end_tokens_of(
    generation_config: transformers.GenerationConfig | None, tokenizer: Any, vocab_size: int
) -> frozenset[int]:
    """The tokens that end an answer, of the model's vocabulary.

    Args:
        generation_config: the model's, or what is used in its place.
        tokenizer: whose own counts, too; None: there is none.
        vocab_size: of the model.
    """
    found: set[int] = set()
    for ids in (getattr(generation_config, "eos_token_id", None), getattr(tokenizer, "eos_token_id", None)):
        found |= {ids} if isinstance(ids, int) else set(ids or ())
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)
