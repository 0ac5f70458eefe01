"""Chooses the size of the pool of keys and values, makes it, and has the runner use it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

import torch

from radixkv.attention import BatchLimits
from radixkv.config import DEFAULT_BLOCK_SIZE, ResolvedEngineConfig
from radixkv.engine.speculator_setup import max_draft_rows
from radixkv.memory import Fp8KVPool, KVPool, LayerShape, StateShape
from radixkv.memory.kv_pool import block_nbytes
from radixkv.memory.state_pool import states_nbytes
from radixkv.model.kv_quantisation import calibrate_kv_scales
from radixkv.model.loader import LoadedModel
from radixkv.model.pool_sizing import choose_num_blocks, free_memory
from radixkv.model.positions.longrope import choose_factors, original_length
from radixkv.model.runner import ModelRunner
from radixkv.sampling.sampler import sample_in_every_way
from radixkv.scheduling.logit_rows import PROMPT_LOGIT_ROWS
from radixkv.sizes import parse_size

_log = logging.getLogger(__name__)

# Of models with recurrent layers, unless it is given.
_MAX_BLOCK_SIZE = 256


def set_up_pool(
    runner: ModelRunner, loaded: LoadedModel, config: ResolvedEngineConfig, element_type: torch.dtype
) -> KVPool:
    """Make the pool that ``config`` asks for, by default of as many blocks as fit, and have the runner use it.

    Raises:
        ValueError: the device or its memory does not allow what ``config`` asks for.
        MemoryError: no room for the blocks.
    """
    num_blocks = config.num_blocks
    layers, recurrent = runner.layer_shapes, runner.recurrent_layers
    block_size = config.block_size or default_block_size(layers, recurrent, element_type)
    scales = None
    if config.kv_cache_dtype == "fp8":
        scales = calibrate_kv_scales(runner, loaded, config.attention_backend, block_size)

    # These do not depend on the pool: how many blocks fit depends on the memory that a step and its graphs take.
    limits = BatchLimits(config.max_num_seqs, loaded.original_max_model_len, max_draft_rows(config))

    def use_pool(num_blocks: int) -> KVPool:
        if scales is None:
            pool = KVPool(layers, num_blocks, block_size, element_type, loaded.device, recurrent)
        else:
            pool = Fp8KVPool(layers, num_blocks, block_size, scales, loaded.dtype, loaded.device, recurrent)
        runner.use_pool(pool, config.attention_backend, limits, config.enforce_eager)
        return pool

    def measure_graphs() -> int:
        """The bytes that CUDA graphs will take; a single block serves to capture some."""
        use_pool(1)
        return runner.measure_graphs(lambda: free_memory(loaded.device))

    if num_blocks is None:
        given = config.kv_cache_memory_bytes
        num_blocks = choose_num_blocks(
            block_nbytes(layers, block_size, element_type) + states_nbytes(recurrent),
            limits.max_num_seqs * -(-loaded.original_max_model_len // block_size),
            loaded.device,
            kv_cache_memory_bytes=None if given is None else parse_size("kv_cache_memory_bytes", given),
            gpu_memory_utilization=config.gpu_memory_utilization,
            measure_activations=lambda: runner.measure_activations(
                config.max_num_batched_tokens,
                limits.max_num_seqs + limits.max_draft_rows + PROMPT_LOGIT_ROWS,
                sample_in_every_way,
            ),
            measure_graphs=measure_graphs,
        )
    pool = use_pool(num_blocks)
    _log.info(
        "KV cache: %d blocks of %d tokens (%.2f GiB%s), %d tokens in all",
        num_blocks,
        block_size,
        pool.nbytes / 2**30,
        f", {states_nbytes(recurrent) / pool.block_nbytes:.0%} of it states" if recurrent else "",
        num_blocks * block_size,
    )
    return pool


def default_block_size(
    layers: Sequence[LayerShape], recurrent_layers: Sequence[Sequence[StateShape]], dtype: torch.dtype
) -> int:
    """Tokens per block such that the states in it take no more than keys and values do, within bounds.

    Below, most memory would go into states; above, few prompts would have a prefix of whole blocks in common.
    """
    size = DEFAULT_BLOCK_SIZE
    while size < _MAX_BLOCK_SIZE and block_nbytes(layers, size, dtype) < states_nbytes(recurrent_layers):
        size *= 2
    return size


def with_length_in_pool(loaded: LoadedModel, pool: KVPool) -> LoadedModel:
    """The model, with its length limited to what an empty pool has room for, and rotary factors for that length."""
    # The last generated token is never computed and takes no slot.
    length = min(loaded.original_max_model_len, pool.num_blocks * pool.block_size + 1)
    return replace(loaded, max_model_len=length, rope_factors=choose_factors(loaded.model, length))


def log_length(loaded: LoadedModel, *, asked_for: bool) -> None:
    """Log the length and the rotary factors that `with_length_in_pool` has chosen, where there was a choice.

    Args:
        asked_for: whether the user set the model's length.
    """
    if loaded.max_model_len < loaded.original_max_model_len:
        _log.log(
            logging.WARNING if asked_for else logging.INFO,
            "%s: a sequence has at most %d tokens, not %d: there is no room for more (kv_cache_memory_bytes, num_blocks)",
            loaded.name,
            loaded.max_model_len,
            loaded.original_max_model_len,
        )
    if loaded.rope_factors is not None:
        _log.log(
            logging.INFO if asked_for or loaded.rope_factors == "short" else logging.WARNING,
            "%s: its rotary positions (longrope) are by the %s factors for all sequences, because one may have %d tokens; "
            "with a max_model_len of up to %d they are by the short ones",
            loaded.name,
            loaded.rope_factors,
            loaded.max_model_len,
            original_length(loaded.model) + 1,
        )
