"""The element type that keys and values are stored in, and the scales that float8 needs.

Scales are chosen once, before anything is cached, and never change: a block that is shared, forked or matched again much
later must be read with the scales that it was written with. Scales that follow the data would break that, or need one
scale per block, which every copy, every partly filled block and every kernel must keep up to date.

They come from one forward pass over tokens spread evenly over the vocabulary, through the backend that will be used. How
large a head's keys and values get depends on the weights, norms, biases and rotations included, so that meaningless tokens
show it too, and neither a tokenizer nor a text is needed. On SmolLM2-135M-Instruct, prose, code, chats and other scripts
reach at most 2.2 times the largest numbers of this pass, in any head of any layer; scales have a margin of 4 times, at no
measurable cost in float8: 1, 4, 16 and 64 gave the same error. Larger numbers are clamped. Too small a range does harm: with
scales of an eighth the answers were nonsense.

Keys and values within one prompt chunk are rounded as well, since a later step reads them from the cache: otherwise an
answer would depend on how its prompt was split into chunks and on what was cached.

One dependence remains. Batches of other shapes differ by about 1e-6 in float32; where that changes the float8 number that a
value rounds to, the difference is up to an eighth, and the layers above spread it. So equal requests in different batches
differ by part of float8's difference from the model: on SmolLM2, log-probabilities of a prompt in chunks of 100 tokens by
0.04 on average from those in chunks of 512 (4e-6 without fp8), and those of either by 0.08 from the model's.
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv.attention import BatchLimits, QueryBatch
from radixkv.cache import PrefixCache
from radixkv.memory import KVPool, KVScales
from radixkv.memory.fp8_kv_pool import FP8
from radixkv.model.loader import LoadedModel
from radixkv.model.model_input import HOST_TOKEN, ModelInput
from radixkv.model.runner import ModelRunner

CALIBRATION_TOKENS = 512


def resolve_kv_cache_dtype(kv_cache_dtype: str, loaded: LoadedModel) -> torch.dtype:
    """The element type of the pool: "auto" is the model's own, "fp8" float8_e4m3fn.

    Raises:
        ValueError: the GPU is older than float8.
    """
    if kv_cache_dtype == "auto":
        return loaded.dtype
    if loaded.device.type == "cuda":
        capability = torch.cuda.get_device_capability(loaded.device)
        if capability < (8, 9):
            raise ValueError(
                f"kv_cache_dtype: 'fp8' needs a GPU of compute capability 8.9 or later (Ada, Hopper), "
                f"got {capability[0]}.{capability[1]} ({torch.cuda.get_device_name(loaded.device)}): use 'auto'"
            )
    return FP8


def calibrate_kv_scales(runner: ModelRunner, loaded: LoadedModel, backend: str, block_size: int) -> KVScales:
    """Scales of every layer and head, by a forward pass over a small pool; call `ModelRunner.use_pool` again afterwards.

    Raises:
        ValueError: there is no such backend, it cannot run here, or the model's keys or values are not finite.
    """
    num_tokens = min(CALIBRATION_TOKENS, loaded.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    token_ids = np.arange(num_tokens) * loaded.vocab_size // num_tokens
    pool = KVPool(runner.layer_shapes, num_blocks, block_size, loaded.dtype, loaded.device, runner.recurrent_layers)
    for tensor in (*pool.keys, *pool.values):
        tensor.zero_()
    runner.use_pool(pool, backend, BatchLimits(1, num_blocks * block_size), enforce_eager=True)
    cache = PrefixCache(num_blocks, block_size)
    table = cache.open(token_ids)
    cache.reserve(table, num_tokens)
    zero = np.zeros(1, dtype=np.int64)
    queries = QueryBatch([table], num_context=zero, num_new=zero + num_tokens)
    runner.run(ModelInput(token_ids, queries, num_logits=zero, device_indices=zero + HOST_TOKEN))
    keys, values = ([rows.float().abs().amax((0, 2)) for rows in layers] for layers in (pool.key_rows, pool.value_rows))
    return KVScales.for_largest(keys, values, loaded.dtype)
