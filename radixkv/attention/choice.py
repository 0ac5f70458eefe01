"""Chooses the backend that carries out attention plans."""

from __future__ import annotations

import importlib.util
from typing import get_args

import torch

from radixkv.attention.backend import AttentionBackend, BatchLimits
from radixkv.attention.native import NativeBackend, is_available
from radixkv.attention.torch_cpu import TorchBackend
from radixkv.config import AttentionBackendName
from radixkv.memory import KVPool

BACKENDS: tuple[str, ...] = get_args(AttentionBackendName)


def make_backend(
    name: str, pool: KVPool, dtype: torch.dtype, num_query_heads: int, limits: BatchLimits
) -> AttentionBackend:
    """Make the backend of that name; "auto" is Triton on a GPU, and on a CPU native code where available, else torch.

    Args:
        dtype: of queries.
        num_query_heads: of the first layer.

    Raises:
        ValueError: there is no such backend, it cannot run here, or it cannot take the pool.
    """
    if name not in BACKENDS:
        raise ValueError(f"attention_backend: expected one of {BACKENDS}, got {name!r}")
    device = pool.keys[0].device.type
    if name == "auto":
        name = "triton" if device == "cuda" else "native" if is_available(pool, dtype) else "torch"
    if name == "native":
        if not is_available(pool, dtype):
            raise ValueError(
                "attention_backend: 'native' needs a CPU that one of its variants runs on, and keys and values "
                f"stored in the model's type, float32 or bfloat16; got {pool.dtype} on {device}"
            )
        return NativeBackend(pool, limits.max_num_seqs, limits.max_model_len)
    if name == "torch":
        if device == "cuda":
            raise ValueError("attention_backend: 'torch' runs on a CPU, and the model is on a GPU")
        return TorchBackend(pool, limits.max_num_seqs, limits.max_model_len)
    if importlib.util.find_spec("triton") is None:
        raise ValueError("attention_backend: 'triton' needs the package triton: pip install 'radixkv[gpu]'")
    # Imported only here: without a GPU, Triton need not be installed.
    from radixkv.attention.triton import TritonBackend
    from radixkv_kernels.target import interpreted

    if device != "cuda" and not interpreted():
        raise ValueError("attention_backend: 'triton' needs a GPU, or TRITON_INTERPRET=1 to interpret kernels, slowly")
    return TritonBackend(
        pool,
        dtype,
        num_query_heads,
        limits.max_num_seqs,
        limits.max_model_len,
        max_draft_rows=limits.max_draft_rows,
    )
