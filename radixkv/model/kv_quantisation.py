"""What type keys and values are stored in, and the scales that float8 needs.

Scales are chosen once, before anything is cached, and never change: a block that is shared, forked or found again much
later must mean to everybody what it meant when it was written. Scales that follow the data would break that, or cost a
scale a block that every copy, every partly filled block and every kernel has to keep right.

They come from one forward pass over tokens spread evenly over the vocabulary, through the backend that will be used. How
large a head's keys and values get is the weights' doing, norms, biases and rotations included, so that tokens without sense
show it too, and neither a tokenizer nor a text is needed. On SmolLM2-135M-Instruct, prose, code, chats and other scripts
reach at most 2.2 times the largest numbers of this pass, in any head of any layer; scales have room for 4 times, which
costs float8 nothing that can be measured: 1, 4, 16 and 64 gave the same error. What is larger still is clamped. Too little
room is what hurts: with scales of an eighth the answers were nonsense.

What a prompt's tokens see of each other is rounded as well, since it is read from the cache a step later: otherwise an
answer would depend on how its prompt was cut into chunks and on what was cached.

One dependence remains. Batches of other shapes differ by about 1e-6 in float32; where that carries a number over a border
between two of float8's it becomes up to an eighth, and the layers above spread it. So equal requests in different company
differ by part of what float8 differs from the model: on SmolLM2, log-probabilities of a prompt in chunks of 100 tokens by
0.04 on average from those in chunks of 512 (4e-6 without fp8), and those of either by 0.08 from the model's.
"""

from __future__ import annotations

import numpy as np
import torch

from radixkv.attention import QueryBatch
from radixkv.cache import PrefixCache
from radixkv.memory import KVPool, KVScales
from radixkv.memory.fp8_kv_pool import FP8
from radixkv.model.loader import LoadedModel
from radixkv.model.runner import HOST_TOKEN, ModelInput, ModelRunner

KV_CACHE_DTYPES = ("auto", "fp8")

CALIBRATION_TOKENS = 512


def cache_element_type(kv_cache_dtype: str, loaded: LoadedModel) -> torch.dtype:
    """The element type of the pool: "auto" is the model's own, "fp8" float8_e4m3fn.

    Raises:
        ValueError: there is no such choice, or the GPU is older than float8.
    """
    if kv_cache_dtype not in KV_CACHE_DTYPES:
        raise ValueError(f"kv_cache_dtype: expected one of {', '.join(KV_CACHE_DTYPES)}, got {kv_cache_dtype!r}")
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


def calibrate(runner: ModelRunner, loaded: LoadedModel, backend: str, block_size: int) -> KVScales:
    """Scales for every layer and head, by a forward pass over a small pool; the runner needs another pool afterwards.

    Raises:
        ValueError: there is no such backend, it cannot run here, or the model's keys or values are not finite.
    """
    num_tokens = min(CALIBRATION_TOKENS, loaded.max_model_len)
    num_blocks = -(-num_tokens // block_size)
    token_ids = np.arange(num_tokens) * loaded.vocab_size // num_tokens
    pool = KVPool(runner.layer_shapes, num_blocks, block_size, loaded.dtype, loaded.device)
    for tensor in (*pool.keys, *pool.values):
        tensor.zero_()
    runner.use_pool(pool, backend, 1, num_blocks * block_size, enforce_eager=True)
    cache = PrefixCache(num_blocks, block_size)
    table = cache.open(token_ids)
    cache.reserve(table, num_tokens)
    zero = np.zeros(1, dtype=np.int64)
    queries = QueryBatch([table], num_context=zero, num_new=zero + num_tokens)
    runner.run(ModelInput(token_ids, queries, num_logits=zero, device_indices=zero + HOST_TOKEN))
    keys, values = ([rows.float().abs().amax((0, 2)) for rows in r] for r in (pool.key_rows, pool.value_rows))
    return KVScales.for_largest(keys, values, loaded.dtype)
