"""Programs that load a model each, one after the other: a model is loaded once for all of them."""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest.mock import patch

from radixkv.config import ModelConfig
from radixkv.model.loader import LoadedModel, load_model


def models_loaded_once(num_layers: int | None = None) -> Any:
    """While entered, `LLM` takes a model that it was given before, as it is in memory, instead of loading it again.

    A model belongs to the last engine that took it, so no earlier one may still run.

    Args:
        num_layers: only so many first layers of the default model, where it does not matter what is generated: the
            tokenizer and the chat format are its own, the text is meaningless.
    """

    def load(model: Any, config: ModelConfig, **options: Any) -> LoadedModel:
        if model is not None:
            return load_model(model, config, **options)
        return _load_once(num_layers, config, frozenset(options.items()))

    return patch("radixkv.llm.load_model", load)


@cache
def _load_once(num_layers: int | None, config: ModelConfig, options: frozenset[tuple[str, Any]]) -> LoadedModel:
    loaded = load_model(None, config, **dict(options))
    if num_layers is not None:
        loaded.model.model.layers = loaded.model.model.layers[:num_layers]
        loaded.model.config.num_hidden_layers = num_layers
    return loaded
