"""Describes what a replica runs: only the replica itself can, because it has the weights."""

from __future__ import annotations

import logging
import secrets
from typing import Any

import xxhash

from radixkv import __version__
from radixkv.async_llm import AsyncLLM
from radixkv.cluster.description import ReplicaDescription
from radixkv.engine.engine import Engine
from radixkv.model.fingerprint import ModelFiles, tensors_digest
from radixkv.model.loader import LoadedModel
from radixkv.model.native import weights_of
from radixkv.model.tokenizer import tokenizer_digest
from radixkv_cpu import BlockWeight, QuantisedWeight

_log = logging.getLogger(__name__)


async def describe(llm: AsyncLLM, instance: str, started: float) -> ReplicaDescription:
    """The description of the replica that runs this engine. The first time, it reads the files of the model.

    Raises:
        EngineDeadError: the engine has died.
    """
    capacity, of_engine = await llm.call(_describe_engine)
    of_model = await llm.run_tokenizer(_describe_model, num_slots=0)
    identity = {"version": __version__, **of_model, **of_engine}
    return ReplicaDescription(instance, started, identity, capacity, _chat_template(llm.loaded))


def _describe_engine(engine: Engine) -> tuple[dict[str, int], dict[str, Any]]:
    capacity = {
        "max_model_len": engine.loaded.max_model_len,
        "max_num_seqs": engine.capacity.max_num_seqs,
        "max_num_batched_tokens": engine.capacity.max_num_batched_tokens,
    }
    weights = weights_of(engine.loaded.model)
    options = {
        "block_size": engine.cache.block_size,
        "block_bytes": engine.pool.block_nbytes,
        "enable_prefix_caching": engine.enable_prefix_caching,
        "quantised_bytes": sum(
            weight.nbytes for weight in weights if isinstance(weight, QuantisedWeight | BlockWeight)
        ),
    }
    return capacity, options


def _describe_model(loaded: LoadedModel) -> dict[str, Any]:
    return {
        "tokenizer": tokenizer_digest(loaded.tokenizer),
        "model": loaded.name,
        "weights": _weights_name(loaded),
        "dtype": str(loaded.dtype).removeprefix("torch."),
        "model_length": loaded.original_max_model_len,
        "rope_factors": loaded.rope_factors or "",
        "vocab_size": loaded.vocab_size,
        "eos_token_ids": sorted(loaded.eos_token_ids),
        "sampling_defaults": dict(loaded.sampling_defaults),
        "chat_template": xxhash.xxh3_64_hexdigest(str(_chat_template(loaded)).encode()),
    }


def _chat_template(loaded: LoadedModel) -> str | dict[str, str] | None:
    return getattr(loaded.tokenizer, "chat_template", None)


def _weights_name(loaded: LoadedModel) -> str:
    """A name of the weights as they were loaded: of their files, or of their tensors before native code repacked them."""
    origin = loaded.origin
    if isinstance(origin, ModelFiles):
        name = origin.digest()
    elif origin is not None or loaded.device.type == "cpu":
        name = origin or loaded.fingerprint
    else:
        name = tensors_digest(loaded.model)  # nothing repacks them
    if name is None:
        _log.warning(
            "%s: its weights were changed since, and cannot be named: no other replica goes on with its answers",
            loaded.name,
        )
        return secrets.token_hex(16)
    return name
