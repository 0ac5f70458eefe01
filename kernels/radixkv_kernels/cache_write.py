"""Stores new keys and values in their blocks.

Bytes moved: each new key and value is read once and written once, ``tokens * kv heads * (key dim + value dim)`` elements of
the model's type and as many of the cache's, and 8 bytes of slot per token and head. The floor on a GPU of B bytes/s is their
sum over B. 256 decoding sequences with 8 heads of 128 in bfloat16 move 2 MB, so a launch is all it costs; a prompt of 65,536
tokens moves 537 MB (0.12 ms at 4.3 TB/s).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.checked_once import checked_once
from radixkv_kernels.checks import (
    FLOATS,
    check_at_most,
    check_cache,
    check_device,
    check_scales,
    check_tensor,
    check_written,
)
from radixkv_kernels.launch import Launch, launch
from radixkv_kernels.target import COMPILE_OPTIONS

_TOKENS = 16


@triton.jit(do_not_specialize=["num_tokens"])
def _write_cache(
    key, value, key_cache, value_cache, slots, key_scales, value_scales,
    num_tokens,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    key_block_stride, key_slot_stride, key_cache_head_stride,
    value_block_stride, value_slot_stride, value_cache_head_stride,
    TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr, KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    KEY_TILE: tl.constexpr, VALUE_TILE: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """One program: ``TOKENS`` tokens of one head, their keys and then their values; grid (tokens / ``TOKENS``, kv heads).

    Shapes and types as in `write_cache`. Strides in elements; the last of each tensor, ``slots`` and scales is 1.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    slot = tl.load(slots + token, mask=token < num_tokens, other=-1)
    wanted = slot >= 0
    block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
    token = token.to(tl.int64)

    dim = tl.arange(0, KEY_TILE)
    mask = wanted[:, None] & (dim < KEY_DIM)[None, :]
    source = key + head * key_head_stride + (token * key_token_stride)[:, None] + dim[None, :]
    target = key_cache + head * key_cache_head_stride
    target += (block * key_block_stride + offset * key_slot_stride)[:, None] + dim[None, :]
    data = tl.load(source, mask=mask, other=0.0)
    store_scaled(target, data, mask, key_scales, head, QUANTISED)

    dim = tl.arange(0, VALUE_TILE)
    mask = wanted[:, None] & (dim < VALUE_DIM)[None, :]
    source = value + head * value_head_stride + (token * value_token_stride)[:, None] + dim[None, :]
    target = value_cache + head * value_cache_head_stride
    target += (block * value_block_stride + offset * value_slot_stride)[:, None] + dim[None, :]
    data = tl.load(source, mask=mask, other=0.0)
    store_scaled(target, data, mask, value_scales, head, QUANTISED)


@triton.jit
def store_scaled(target, data, mask, scales, head, QUANTISED: tl.constexpr):
    """Store as the cache's type, divided by the head's scale if it is ``QUANTISED``.

    One in 16 bfloat16 numbers lies exactly between two of float8's, so only an exact division rounds it as it should be.
    float8_e4m3fn has no infinity: a number above its largest one would become NaN.
    """
    if QUANTISED:
        data = tl.minimum(tl.maximum(tl.div_rn(data.to(tl.float32), tl.load(scales + head)), -448.0), 448.0)
    tl.store(target, data.to(target.dtype.element_ty), mask=mask)


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> Launch | None:
    """Store one layer's new keys and values.

    Args:
        key: ``[tokens, kv heads, key dim]``, float32, float16 or bfloat16, any strides but the last.
        value: ``[tokens, kv heads, value dim]``, likewise.
        key_cache: ``[num_blocks, block_size, kv heads, key dim]``, of the key's type or float8_e4m3fn; any strides but the
            last that keep entries apart, and a block's within 2**31 elements.
        value_cache: ``[num_blocks, block_size, kv heads, value dim]``, likewise.
        slots: int64 ``[tokens]``: block id * block_size + position in the block, no two alike; negative: the token is not
            stored.
        key_scales: float32 ``[kv heads]``; stored is ``key / scale``. Given if and only if the cache is float8.
        value_scales: float32 ``[kv heads]``, likewise.

    Returns:
        The launch, see `launch.launch`; None also where there was nothing to do.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    check_write(key, value, key_cache, value_cache, slots, key_scales, value_scales)
    num_tokens = key.shape[0]
    if num_tokens == 0:
        return None
    _, block_size, num_kv_heads, key_dim = key_cache.shape
    value_dim = value_cache.shape[3]
    return launch(
        _write_cache, (triton.cdiv(num_tokens, _TOKENS), num_kv_heads),
        key, value, key_cache, value_cache, slots, key_scales, value_scales,
        num_tokens,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        TOKENS=_TOKENS, BLOCK_SIZE=block_size, KEY_DIM=key_dim, VALUE_DIM=value_dim,
        KEY_TILE=triton.next_power_of_2(key_dim), VALUE_TILE=triton.next_power_of_2(value_dim),
        QUANTISED=key_scales is not None, **COMPILE_OPTIONS,
    )  # fmt: skip


@checked_once
def check_write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    key_scales: torch.Tensor | None,
    value_scales: torch.Tensor | None,
) -> None:
    """Refuse arguments of `write_cache` that no kernel that writes into the cache takes.

    Raises:
        ValueError: with what was given.
    """
    check_device("key", key.device)
    check_cache(key_cache, value_cache, key.device)
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        check_written(name, cache)
    num_kv_heads, key_dim = key_cache.shape[2:]
    value_dim = value_cache.shape[3]
    check_tensor("key", key, (None, num_kv_heads, key_dim), FLOATS, key.device)
    num_tokens = key.shape[0]
    check_tensor("value", value, (num_tokens, num_kv_heads, value_dim), (key.dtype,), key.device)
    check_tensor("slots", slots, (num_tokens,), (torch.int64,), key.device)
    check_scales("key_scales", key_scales, num_kv_heads, key_cache.dtype, key.device)
    check_scales("value_scales", value_scales, num_kv_heads, key_cache.dtype, key.device)
    if key_cache.dtype not in (key.dtype, torch.float8_e4m3fn):
        raise ValueError(f"key_cache: expected the key's {key.dtype} or float8_e4m3fn, got {key_cache.dtype}")
    check_at_most("key_cache", "heads", num_kv_heads)
