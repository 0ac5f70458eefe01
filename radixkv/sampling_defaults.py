"""Default sampling parameters: `SamplingParams`' own, overridden by those that a model's authors ship with it as
``generation_config.json``.

The fields are those that vLLM reads from that file, by transformers' names, in which ``max_tokens`` is ``max_new_tokens``.
``do_sample`` is not among them, as in vLLM: only a temperature of 0 is greedy.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Mapping
from typing import Any

from radixkv.option_words import hint
from radixkv.sampling_params import BeamSearchParams, SamplingParams

# Numbers by the names of `SamplingParams`.
SamplingDefaults = Mapping[str, Any]

_log = logging.getLogger(__name__)

# Fields of transformers' GenerationConfig, and what they are called in SamplingParams.
_SAME = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_FIELDS: Mapping[str, str] = types.MappingProxyType({**{name: name for name in _SAME}, "max_new_tokens": "max_tokens"})
NO_DEFAULTS: SamplingDefaults = types.MappingProxyType({})


def defaults_of_model(generation_config: Any, name: str) -> SamplingDefaults:
    """The defaults in a model's generation_config.

    Args:
        generation_config: transformers' object; what it does not set is None or absent.
        name: of the model, for errors.

    Raises:
        ValueError: a value cannot be sampled with; the message names it, and how to do without it.
    """
    values = {name: getattr(generation_config, name, None) for name in _FIELDS}
    try:
        return _checked(values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"generation_config of {name}: {error}; generation_config='vllm' does without it") from None


def given_or_default(params: SamplingParams | None, defaults: SamplingDefaults) -> SamplingParams:
    """The parameters of a request, or the defaults where it has none.

    Raises:
        TypeError: they are of another class.
    """
    if params is None:
        return SamplingParams(**defaults)
    if not isinstance(params, SamplingParams):
        raise TypeError(f"sampling_params: expected SamplingParams, got {type(params).__name__}")
    return params


def check_beam_search_params(params: BeamSearchParams) -> None:
    """Refuse what is given instead of the parameters of a beam search, which has no defaults.

    Raises:
        TypeError: they are of another class.
    """
    if not isinstance(params, BeamSearchParams):
        raise TypeError(f"params: expected BeamSearchParams, got {type(params).__name__}")


def overridden(defaults: SamplingDefaults, values: Mapping[str, Any]) -> SamplingDefaults:
    """The defaults with a user's values in place of the model's.

    Args:
        values: by transformers' names; None: `SamplingParams`' own.

    Raises:
        TypeError, ValueError: a name is unknown, or a value impossible.
    """
    for name in values:
        if name not in _FIELDS:
            raise ValueError(f"{name}: expected one of {', '.join(_FIELDS)}{hint(str(name), _FIELDS)}")
    others = {name: value for name, value in defaults.items() if name not in {_FIELDS[given] for given in values}}
    return types.MappingProxyType({**others, **_checked(values)})


def as_sampling_defaults(values: Mapping[str, Any]) -> SamplingDefaults:
    """Defaults that another process has sent, by the names of `SamplingParams`.

    Raises:
        ValueError: they are not valid defaults.
    """
    names = {field: name for name, field in _FIELDS.items()}
    try:
        return overridden(NO_DEFAULTS, {names.get(field, field): value for field, value in values.items()})
    except TypeError as error:
        raise ValueError(str(error)) from None


def log_defaults(name: str, defaults: SamplingDefaults) -> None:
    """Log the parameters that a model's requests are sampled with by default, where it sets any."""
    if defaults:
        values = ", ".join(f"{field} {value:g}" for field, value in defaults.items())
        _log.info("%s sets sampling defaults: %s (generation_config='vllm' ignores them)", name, values)


def _checked(values: Mapping[str, Any]) -> SamplingDefaults:
    fields = {_FIELDS[name]: value for name, value in values.items() if value is not None}
    params = SamplingParams(**fields)
    # As Python's numbers, whatever they were.
    return types.MappingProxyType({name: getattr(params, name) for name in fields})
