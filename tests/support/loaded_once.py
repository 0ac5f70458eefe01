"""Programs that load a model each, one after the other: a model is loaded once for all of them."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

from radixkv.config import ModelConfig
from radixkv.model.loader import LoadedModel, load_model


def models_loaded_once() -> Any:
    """While entered, `LLM` takes a model that it was given before, as it is in memory, instead of loading it again.

    A model belongs to the last engine that took it, so no earlier one may still run.
    """
    return patch("radixkv.llm.load_model", _load)


def _load(model: Any, config: ModelConfig, **options: Any) -> LoadedModel:
    return (
        _load_once(model, config, frozenset(options.items())) if model is None else load_model(model, config, **options)
    )


@cache
def _load_once(model: None, config: ModelConfig, options: frozenset[tuple[str, Any]]) -> LoadedModel:
    return load_model(model, config, **dict(options))
