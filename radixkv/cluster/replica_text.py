"""How the model of the replicas reads and writes text, as an ingress does it for them, without weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

from radixkv.cluster.description import ReplicaDescription
from radixkv.cluster.generations import Generations
from radixkv.cluster.replica_set import ReplicaSet
from radixkv.config import ModelConfig
from radixkv.errors import ModelLoadError
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.model.text_interface import TextInterface
from radixkv.model.tokenizer import chat_format_of, chosen_tokenizer, load_tokenizer, tokenizer_digest
from radixkv.sampling_defaults import as_sampling_defaults, log_defaults


def text_interface(
    replicas: ReplicaSet, model: str | Path | None = None, config: ModelConfig | None = None
) -> TextInterface:
    """How the model of the replicas reads and writes text; its tokenizer is loaded here.

    Args:
        replicas: with at least one that was reached.
        model: hub id, folder or GGUF file of the tokenizer; None: what the replicas call their model.
        config: how to read its answers (``chat_template``, ``tool_call_parser``, ``reasoning_parser``); None: `ModelConfig`'s
            defaults. A ``tokenizer`` in it takes the place of the model's, and a ``chat_template`` that of the replicas'.

    Raises:
        ModelLoadError: there is no tokenizer, or it makes other tokens of a text than the replicas' does.
        RuntimeError: no replica was reached yet.
    """
    newest = replicas.generations.newest
    if newest is None:
        raise RuntimeError("there was no replica yet: call add first")
    identity, config = newest.identity, config or ModelConfig()
    name = identity["model"] if model is None else model
    tokenizer = chosen_tokenizer(config, lambda: load_tokenizer(None if name == DEFAULT_MODEL_NAME else name))
    if identity["tokenizer"] not in (tokenizer_digest(None), tokenizer_digest(tokenizer)):
        given = f"model: {name}" if config.tokenizer is None else f"tokenizer: {config.tokenizer!s:.80}"
        raise ModelLoadError(
            f"{given}: expected the tokenizer of the replicas' {identity['model']}, and this one makes other tokens of a text"
        )
    loaded = newest_interface(replicas.generations, tokenizer, config)
    log_defaults(loaded.name, loaded.sampling_defaults)
    return loaded


def newest_interface(generations: Generations, tokenizer: Any, config: ModelConfig) -> TextInterface:
    """How the newest generation reads and writes text, with the length of sequences that fit on every replica.

    Args:
        generations: of which there was at least one.
        tokenizer: of the replicas, whatever its chat template.
        config: as for `text_interface`.
    """
    newest = generations.newest
    assert newest is not None
    tokenizer = _with_template_of(newest, tokenizer, config)
    return TextInterface(
        tokenizer=tokenizer,
        name=newest.identity["model"],
        max_model_len=generations.max_model_len,
        vocab_size=newest.identity["vocab_size"],
        eos_token_ids=frozenset(newest.identity["eos_token_ids"]),
        chat_format=chat_format_of(tokenizer, config),
        sampling_defaults=as_sampling_defaults(newest.identity["sampling_defaults"]),
    )


def _with_template_of(newest: ReplicaDescription, tokenizer: Any, config: ModelConfig) -> Any:
    """The tokenizer with the replicas' chat template, unless they have no tokenizer or ``config`` has a template."""
    template = newest.chat_template
    if tokenizer is None or config.chat_template is not None or newest.identity["tokenizer"] == tokenizer_digest(None):
        return tokenizer
    if template == getattr(tokenizer, "chat_template", None):
        return tokenizer
    tokenizer = copy.copy(tokenizer)  # with the same vocabulary
    tokenizer.chat_template = template
    return tokenizer
