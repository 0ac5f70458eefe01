"""The sampling parameters that a model's authors ship with it, and where they are read."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import transformers

from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError, first_line
from radixkv.sampling_defaults import NO_DEFAULTS, SamplingDefaults, defaults_of_model, log_defaults, overridden

_FILE = "generation_config.json"
# Fields by which transformers changes what it generates. None has no effect, and neither has what stands here.
_NOT_APPLIED: Mapping[str, Any] = types.MappingProxyType(
    {
        "bad_words_ids": [],
        "begin_suppress_tokens": [],
        "encoder_no_repeat_ngram_size": 0,
        "encoder_repetition_penalty": 1,
        "epsilon_cutoff": 0,
        "eta_cutoff": 0,
        "exponential_decay_length_penalty": [],
        "forced_eos_token_id": [],
        "guidance_scale": 1,
        "min_length": 0,
        "min_new_tokens": 0,
        "no_repeat_ngram_size": 0,
        "num_beams": 1,
        "penalty_alpha": 0,
        "sequence_bias": [],
        "stop_strings": [],
        "suppress_tokens": [],
        "top_h": 0,
        "typical_p": 1,
        "watermarking_config": {},
    }
)

_log = logging.getLogger(__name__)


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
        return _read(source)
    except ValueError as error:
        raise ValueError(f"{expected} ({error})") from error


def read_own_generation_config(folder: Path, source: str) -> transformers.GenerationConfig | None:
    """The configuration in a model's files; None: there is none, or another replaces it.

    Args:
        folder: of the model.
        source: the option ``generation_config``. With "vllm", only end tokens are read, and the model runs without them, too:
            a warning then says that they cannot be read.

    Raises:
        ModelLoadError: it cannot be read, and its values are to be used; the message names the file.
    """
    if source not in ("auto", "vllm"):
        return None
    path = folder / _FILE
    if not path.is_file():
        return None
    try:
        return _read(folder)
    except ValueError as error:
        if source == "auto":
            raise ModelLoadError(
                f"{path}: expected a generation config, it cannot be read ({error}); generation_config='vllm' does without it"
            ) from error
        _log.warning("%s: it cannot be read (%s): its end tokens are ignored, too", path, error)
        return None


def _read(folder: str | Path) -> transformers.GenerationConfig:
    """What transformers reads from a folder, with end tokens of the right types.

    Raises:
        ValueError: it cannot be read.
    """
    try:
        read = transformers.GenerationConfig.from_pretrained(folder)
    except Exception as error:  # of a file of other contents, any can come
        raise ValueError(first_line(error)) from error
    _end_tokens(read)
    return read


def sampling_defaults_of(
    generation_config: transformers.GenerationConfig | None, config: ModelConfig, name: str
) -> SamplingDefaults:
    """What requests are sampled with that say nothing else; a line of the log says it, where there is anything.

    A warning names the fields that are not applied and change what transformers generates.

    Args:
        generation_config: the model's, or what is used in its place.
        config: says whether it counts, and what is given in the place of its values.
        name: of the model.

    Raises:
        ValueError: nothing can be sampled with a value.
    """
    own = NO_DEFAULTS
    if config.generation_config != "vllm":
        own = defaults_of_model(generation_config, name)
        _warn_of_others(generation_config, name)
    defaults = overridden(own, config.generation_override)
    log_defaults(name, defaults)
    return defaults


def _warn_of_others(generation_config: transformers.GenerationConfig | None, name: str) -> None:
    found = [
        field
        for field, neutral in _NOT_APPLIED.items()
        if getattr(generation_config, field, None) not in (None, neutral)
    ]
    if found:
        _log.warning(
            "generation_config of %s: %s: not applied, though transformers generates other tokens with it; requests may set "
            "bad_words, logit_bias, min_tokens and stop",
            name,
            ", ".join(found),
        )


def end_tokens_of(
    generation_config: transformers.GenerationConfig | None, tokenizer: Any, vocab_size: int
) -> frozenset[int]:
    """The tokens that end an answer, of the model's vocabulary.

    Args:
        generation_config: the model's, or what is used in its place.
        tokenizer: whose own counts, too; None: there is none.
        vocab_size: of the model.

    Raises:
        ValueError: the configuration of a model in memory names something else.
    """
    found = _end_tokens(generation_config) | _end_tokens(tokenizer)
    return frozenset(token_id for token_id in found if 0 <= token_id < vocab_size)


def _end_tokens(source: Any) -> set[int]:
    ids = getattr(source, "eos_token_id", None)
    found = [] if ids is None else [*ids] if isinstance(ids, Iterable) else [ids]
    if not all(isinstance(token_id, int) and not isinstance(token_id, bool) for token_id in found):
        raise ValueError(f"eos_token_id: expected a token id or a list of them, got {ids!r:.80}")
    return set(found)
