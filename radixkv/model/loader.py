"""Loads models from a hub id, a folder, a GGUF file or memory, and refuses those that cannot run over KV cache blocks."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from radixkv.config import ModelConfig
from radixkv.errors import UnsupportedModelError
from radixkv.memory.pages import trim_heap
from radixkv.model.compute_target import ComputeTarget
from radixkv.model.default_model import DEFAULT_MODEL_NAME
from radixkv.model.fingerprint import ModelFiles, model_fingerprint, remember_fingerprint
from radixkv.model.generation_config import (
    end_tokens_of,
    read_generation_config,
    read_own_generation_config,
    sampling_defaults_of,
)
from radixkv.model.model_cache import packed_folder, quantised_folder, remove_unused
from radixkv.model.model_errors import name_of
from radixkv.model.native import BlockKeeper, PanelCache, Quantiser, WeightKeeper, prepare_for_cpu, weights_of
from radixkv.model.positions.longrope import choose_factors
from radixkv.model.positions.rotary_types import fix_dynamic
from radixkv.model.quantisation_report import refuse_other_quantization, report_quantised
from radixkv.model.replacement.deferred_rotation import defer_rotation, restore_rotation
from radixkv.model.replacement.merged_linear import merge_linears
from radixkv.model.replacement.probe import compute_a_few_tokens, probe_attention
from radixkv.model.replacement.replace_modules import refuse_conversion, refuse_saving
from radixkv.model.replacement.unused_parts import drop_unused_parts
from radixkv.model.silence import silence_transformers
from radixkv.model.source import load_errors, resolve_folder
from radixkv.model.supported import check_supported
from radixkv.model.text_interface import TextInterface
from radixkv.model.tokenizer import chat_format_of, chosen_tokenizer, read_tokenizer, warn_of_tokens_beyond
from radixkv.model.weights.checkpoint import read_checkpoint
from radixkv.model.weights.deferred import DeferredWeights
from radixkv.model.weights.shared import share_weights

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LoadedModel(TextInterface):
    """A model that can run over KV cache blocks, with the properties that the engine needs.

    Attributes:
        original_max_model_len: what the model, or its user, allows. Once an engine runs it, ``max_model_len`` is less where
            the engine's pool has no room for so many.
        fingerprint: of its weights, their quantisation and its configuration; None where it was not asked for, and the model
            has an origin or cannot be named any more.
        origin: the files, or the revision on the hub, that it was loaded from; None: it was given in memory.
        rope_factors: by which its rotary embeddings of type longrope rotate, see `choose_factors`; ``max_model_len`` decides.
    """

    model: transformers.PreTrainedModel
    dtype: torch.dtype
    device: torch.device
    original_max_model_len: int
    fingerprint: str | None = None
    origin: ModelFiles | str | None = None
    rope_factors: str | None = None


@dataclass(frozen=True, slots=True)
class _Unprepared:
    """A model as it was given or read, before any module is replaced.

    Attributes:
        tokenizer: to be used with it; None: there is none.
        origin: as of `LoadedModel`.
        deferred: its weights, where they are not in memory.
        generation_config: what its files say; None: nothing, or it was given in memory.
    """

    model: transformers.PreTrainedModel
    name: str
    tokenizer: Any
    origin: ModelFiles | str | None = None
    deferred: DeferredWeights | None = None
    generation_config: transformers.GenerationConfig | None = None


def load_model(
    model: str | Path | transformers.PreTrainedModel | None = None,
    config: ModelConfig | None = None,
    *,
    native: bool = True,
    fingerprint: bool = False,
) -> LoadedModel:
    """Load a model for inference.

    Args:
        model: hub id, folder, GGUF file or loaded model; None: the default model.
        config: how to load it; None: `ModelConfig`'s defaults.
        native: on a CPU, let native code stand in for the model's modules; torch's compiler cannot trace it.
        fingerprint: read all weights once more, to name them. Those of a model in a CPU's memory are always read.

    Raises:
        ModelLoadError: the model does not exist or cannot be read, or there is too little memory for its weights.
        UnsupportedModelError: the model cannot run over KV cache blocks, or not all of its weights are on one device.
        ValueError: ``dtype``, ``device``, ``max_model_len``, ``quantization`` or ``chat_template`` is impossible for this
            model and machine; ``generation_config`` is not there, or nothing can be sampled with it; or the model's weights
            are to be named and cannot be, see `model_fingerprint`.
    """
    config = config or ModelConfig()
    generation_config = read_generation_config(config.generation_config)
    target = ComputeTarget.of(config, native)
    if isinstance(model, transformers.PreTrainedModel):
        unprepared = _from_memory(model, config, target)
    else:
        unprepared = _from_files(model, config, target)
    return _prepare(unprepared, config, generation_config, native, fingerprint)


def _prepare(
    unprepared: _Unprepared,
    config: ModelConfig,
    generation_config: transformers.GenerationConfig | None,
    native: bool,
    fingerprint: bool,
) -> LoadedModel:
    """Check a model, replace its modules, and collect what the engine needs of it.

    Args:
        generation_config: in place of the model's own.
        native: as of `load_model`.
        fingerprint: likewise.
    """
    model, name = unprepared.model, unprepared.name
    model.eval()
    check_supported(model, name)
    vocab_size = model.config.get_text_config().vocab_size
    max_model_len = _max_model_len(model, name, config.max_model_len)
    rope_factors = choose_factors(model, max_model_len)
    fix_dynamic(model)
    generation_config = generation_config or unprepared.generation_config or model.generation_config
    sampling_defaults = sampling_defaults_of(generation_config, config, name)
    warn_of_tokens_beyond(vocab_size, unprepared.tokenizer, name)
    weights_fingerprint = _fingerprint(unprepared, config.quantization, is_wanted=fingerprint)
    if unprepared.origin is not None:
        drop_unused_parts(model, name)
    if model.device.type == "cpu":
        _prepare_on_cpu(unprepared, config, native)
    else:
        _prepare_on_gpu(model, name, config)
    if weights_fingerprint is not None:
        remember_fingerprint(model, weights_fingerprint)
    remove_unused()  # now that what this model uses is marked
    return LoadedModel(
        model=model,
        tokenizer=unprepared.tokenizer,
        name=name,
        max_model_len=max_model_len,
        original_max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_token_ids=end_tokens_of(generation_config, unprepared.tokenizer, vocab_size),
        dtype=model.dtype,
        device=model.device,
        chat_format=chat_format_of(unprepared.tokenizer, config),
        sampling_defaults=sampling_defaults,
        fingerprint=weights_fingerprint,
        origin=unprepared.origin,
        rope_factors=rope_factors,
    )


def _max_model_len(model: transformers.PreTrainedModel, name: str, asked_for: int | None) -> int:
    """The most tokens of a sequence: as many as asked for, or as the model has positions."""
    longest: int = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**20
    if asked_for is not None and asked_for > longest:
        raise ValueError(f"max_model_len: expected 2 to {longest} for {name}, got {asked_for!r}")
    return asked_for or longest


def _from_memory(model: transformers.PreTrainedModel, config: ModelConfig, target: ComputeTarget) -> _Unprepared:
    name = name_of(model)
    devices = {str(parameter.device) for parameter in model.parameters()}
    if len(devices) > 1 or "meta" in devices:  # accelerate leaves what it offloads there
        raise UnsupportedModelError(
            f"{name}: expected all weights on one CPU or GPU, got them on {', '.join(sorted(devices))}"
        )
    if config.dtype != "auto" and target.dtype != model.dtype:
        raise ValueError(
            f"dtype: expected 'auto', for a loaded model keeps its own, {model.dtype}, got {config.dtype!r}; "
            f"model.to({target.dtype}) converts it"
        )
    ComputeTarget(model.device, model.dtype, target.native).check_quantization(config.quantization)
    tokenizer = chosen_tokenizer(config, lambda: None)
    return _Unprepared(model, name, tokenizer)


def _from_files(model: str | Path | None, config: ModelConfig, target: ComputeTarget) -> _Unprepared:
    target.check_quantization(config.quantization)
    name = DEFAULT_MODEL_NAME if model is None else str(model)
    with silence_transformers():
        folder, revision = resolve_folder(model, config.quantization == "gguf")
        tokenizer = chosen_tokenizer(config, partial(_read_own_tokenizer, folder, name))
        with load_errors(name):
            origin = revision or ModelFiles.of(folder)
            generation_config = read_own_generation_config(folder, config.generation_config)
            # Weights may stay in their files until native code packs them.
            may_defer = target.native_unsupported_reason is None
            loaded, deferred = read_checkpoint(folder, name, target.dtype, target.device, may_defer)
    loaded.config.name_or_path = name  # as errors name it, not the folder that it was fetched or converted to
    return _Unprepared(loaded, name, tokenizer, origin, deferred, generation_config)


def _read_own_tokenizer(folder: Path, name: str) -> Any:
    with load_errors(name):
        return read_tokenizer(folder)


def _fingerprint(unprepared: _Unprepared, quantization: str | None, is_wanted: bool) -> str | None:
    """`model_fingerprint`; None: it is not wanted, or follows from the model's origin, or cannot be computed."""
    # Once native code has repacked weights that are of no file, nothing else identifies them.
    is_needed = unprepared.origin is None and unprepared.model.device.type == "cpu"
    if not is_wanted and not is_needed:
        return None
    try:
        return model_fingerprint(unprepared.model, quantization, unprepared.deferred)
    except ValueError:  # the weights were repacked already, by an engine that could not name them either
        if is_wanted:
            raise
        return None


def _prepare_on_cpu(unprepared: _Unprepared, config: ModelConfig, native: bool) -> None:
    """Let native code stand in for the model's modules, and quantise, share or trim what is in memory then."""
    model, name, deferred = unprepared.model, unprepared.name, unprepared.deferred
    refuse_other_quantization(model, name, config.quantization)
    keeper: WeightKeeper | None = None
    if config.quantization not in (None, "gguf"):
        cache = None if unprepared.origin is None else PanelCache(quantised_folder())
        keeper = Quantiser(str(config.quantization), cache)
    elif deferred is not None and deferred.has_blocks:
        keeper = BlockKeeper(deferred)
    num_linears = sum(isinstance(module, torch.nn.Linear) for module in model.modules())
    parameters = dict(model.named_parameters()).keys()
    try:
        prepare_for_cpu(model, native, keeper, deferred)
    except ValueError as error:  # names the module whose weights cannot be quantised
        raise ValueError(f"{name}: {error}") from error
    if parameters - dict(model.named_parameters()).keys():
        refuse_saving(model, name)
        refuse_conversion(model, name)
    report_quantised(model, name, config.quantization, num_linears)
    if config.share_weights:
        share_weights(weights_of(model), packed_folder())
    trim_heap()


def _prepare_on_gpu(model: transformers.PreTrainedModel, name: str, config: ModelConfig) -> None:
    """Merge linear layers, and leave rotation to the kernel that stores keys, where ``config`` asks for it."""
    restore_rotation(model)
    if config.merge_linears:
        # Another LLM may have left it with an attention that only its runner can carry out.
        with probe_attention(model):
            num_merged = merge_linears(model, partial(compute_a_few_tokens, model))
        _log.info("%s: %d linear layers were merged with others of the same input", name, num_merged)
    if config.fuse_rotary:
        _log.info("%s: %d attention layers leave rotation to the kernel that stores keys", name, defer_rotation(model))
