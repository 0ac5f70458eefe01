"""Rotates queries and new keys, and stores keys and values in their blocks, in one launch.

Rotary embedding (Su et al. 2021) in the form that transformers' models have, halves of a head as pairs::

    first'  = first * cos - second * sin
    second' = second * cos + first * sin

computed in float32 and rounded once. A model that rotates fewer dimensions than a head has leaves the others as they are.

Bytes moved: those of `write_cache`, and each query read and written, ``2 * tokens * query heads * key dim`` elements, and
cosines and sines, ``2 * rotary dim`` elements per token. The floor on a GPU of B bytes/s is their sum over B. 256 decoding
rows of 32 and 8 heads of 128 in bfloat16 move 6 MB, 1.5 us at 4.3 TB/s, so a launch is all it costs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from radixkv_kernels.cache_write import check_write, store_scaled
from radixkv_kernels.checked_once import checked_once
from radixkv_kernels.checks import FLOATS, check_at_most, check_tensor, check_written
from radixkv_kernels.launch import Launch, launch
from radixkv_kernels.target import COMPILE_OPTIONS

_TOKENS = 8


@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_and_write(
    query, key, value, cosines, sines, key_cache, value_cache, slots, rotated, key_scales, value_scales,
    num_tokens,
    query_token_stride, query_head_stride, rotated_token_stride, rotated_head_stride,
    key_token_stride, key_head_stride, value_token_stride, value_head_stride,
    cosine_stride, sine_stride,
    key_block_stride, key_slot_stride, key_cache_head_stride,
    value_block_stride, value_slot_stride, value_cache_head_stride,
    KV_HEADS: tl.constexpr, TOKENS: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEY_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_TILE: tl.constexpr,
    HALF: tl.constexpr, HALF_TILE: tl.constexpr, REST_TILE: tl.constexpr, QUANTISED: tl.constexpr,
):  # fmt: skip
    """One program: ``TOKENS`` tokens of one head, a key-value head or, after those, a query head; grid (tokens, heads).

    Shapes and types as in `rotate_and_write`. Strides in elements; the last of each tensor, ``slots`` and scales is 1.
    """
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1).to(tl.int64)
    exists = token < num_tokens
    slot = tl.load(slots + token, mask=exists, other=-1)
    token = token.to(tl.int64)
    is_key = head < KV_HEADS
    if is_key:
        source = key + head * key_head_stride + token * key_token_stride
        wanted = slot >= 0
    else:
        source = query + (head - KV_HEADS) * query_head_stride + token * query_token_stride
        wanted = exists

    pair = tl.arange(0, HALF_TILE)
    mask = wanted[:, None] & (pair < HALF)[None, :]
    first = tl.load(source[:, None] + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    second = tl.load(source[:, None] + HALF + pair[None, :], mask=mask, other=0.0).to(tl.float32)
    cosine = cosines + (token * cosine_stride)[:, None] + pair[None, :]
    sine = sines + (token * sine_stride)[:, None] + pair[None, :]
    new_first = first * tl.load(cosine, mask=mask, other=0.0).to(tl.float32)
    new_first -= second * tl.load(sine, mask=mask, other=0.0).to(tl.float32)
    new_second = second * tl.load(cosine + HALF, mask=mask, other=0.0).to(tl.float32)
    new_second += first * tl.load(sine + HALF, mask=mask, other=0.0).to(tl.float32)
    # As the model's own rotation would have rounded it, before a float8 cache rounds once more.
    new_first, new_second = new_first.to(query.dtype.element_ty), new_second.to(query.dtype.element_ty)
    if is_key:
        block, offset = slot // BLOCK_SIZE, slot % BLOCK_SIZE
        target = key_cache + head * key_cache_head_stride + block * key_block_stride + offset * key_slot_stride
        store_scaled(target[:, None] + pair[None, :], new_first, mask, key_scales, head, QUANTISED)
        store_scaled(target[:, None] + HALF + pair[None, :], new_second, mask, key_scales, head, QUANTISED)
        if 2 * HALF < KEY_DIM:
            rest = 2 * HALF + tl.arange(0, REST_TILE)
            rest_mask = wanted[:, None] & (rest < KEY_DIM)[None, :]
            unchanged = tl.load(source[:, None] + rest[None, :], mask=rest_mask, other=0.0)
            store_scaled(target[:, None] + rest[None, :], unchanged, rest_mask, key_scales, head, QUANTISED)
        dim = tl.arange(0, VALUE_TILE)
        value_mask = wanted[:, None] & (dim < VALUE_DIM)[None, :]
        value_source = value + head * value_head_stride + token * value_token_stride
        target = value_cache + head * value_cache_head_stride + block * value_block_stride + offset * value_slot_stride
        data = tl.load(value_source[:, None] + dim[None, :], mask=value_mask, other=0.0)
        store_scaled(target[:, None] + dim[None, :], data, value_mask, value_scales, head, QUANTISED)
    else:
        output = rotated + (head - KV_HEADS) * rotated_head_stride + token * rotated_token_stride
        tl.store(output[:, None] + pair[None, :], new_first, mask=mask)
        tl.store(output[:, None] + HALF + pair[None, :], new_second, mask=mask)
        if 2 * HALF < KEY_DIM:
            rest = 2 * HALF + tl.arange(0, REST_TILE)
            rest_mask = wanted[:, None] & (rest < KEY_DIM)[None, :]
            unchanged = tl.load(source[:, None] + rest[None, :], mask=rest_mask, other=0.0)
            tl.store(output[:, None] + rest[None, :], unchanged, mask=rest_mask)


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cosines: torch.Tensor,
    sines: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    rotated: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> Launch | None:
    """Rotate one layer's queries, and store its new keys, rotated, and values.

    Args:
        query: ``[tokens, query heads, key dim]``, of the key's type, any strides but the last.
        key: ``[tokens, kv heads, key dim]``, as in `write_cache`; it stays as it is.
        value: ``[tokens, kv heads, value dim]``, likewise.
        cosines: ``[tokens, rotary dim]``, float32, float16 or bfloat16, for both halves; the rotary dim is even, and at most
            the key dim.
        sines: likewise.
        key_cache: as in `write_cache`.
        value_cache: as in `write_cache`.
        slots: int64 ``[tokens]``, as in `write_cache`; negative: the token's key and value are not stored.
        rotated: like the query, where its rotation goes; other memory than the query's.
        key_scales: as in `write_cache`.
        value_scales: as in `write_cache`.

    Returns:
        See `write_cache`.

    Raises:
        ValueError: a shape, type, device or stride that the kernel cannot take; nothing is written.
    """
    check_write(key, value, key_cache, value_cache, slots, key_scales, value_scales)
    _check_rotation(query, rotated, key, cosines, sines)
    num_tokens, num_kv_heads, key_dim = key.shape
    if num_tokens == 0:
        return None
    value_dim, half = value.shape[2], cosines.shape[1] // 2
    return launch(
        _rotate_and_write, (triton.cdiv(num_tokens, _TOKENS), num_kv_heads + query.shape[1]),
        query, key, value, cosines, sines, key_cache, value_cache, slots, rotated, key_scales, value_scales,
        num_tokens,
        *query.stride()[:2], *rotated.stride()[:2], *key.stride()[:2], *value.stride()[:2],
        cosines.stride(0), sines.stride(0),
        *key_cache.stride()[:3], *value_cache.stride()[:3],
        KV_HEADS=num_kv_heads, TOKENS=_TOKENS, BLOCK_SIZE=key_cache.shape[1],
        KEY_DIM=key_dim, VALUE_DIM=value_dim, VALUE_TILE=triton.next_power_of_2(value_dim),
        HALF=half, HALF_TILE=triton.next_power_of_2(half),
        REST_TILE=triton.next_power_of_2(max(1, key_dim - 2 * half)),
        QUANTISED=key_scales is not None, **COMPILE_OPTIONS,
    )  # fmt: skip


@checked_once
def _check_rotation(
    query: torch.Tensor, rotated: torch.Tensor, key: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor
) -> None:
    num_tokens, num_kv_heads, key_dim = key.shape
    check_tensor("query", query, (num_tokens, None, key_dim), (key.dtype,), key.device)
    check_tensor("rotated", rotated, tuple(query.shape), (key.dtype,), key.device)
    check_written("rotated", rotated)
    check_at_most("query", "heads, those of keys included,", query.shape[1] + num_kv_heads)
    check_tensor("cosines", cosines, (num_tokens, None), FLOATS, key.device)
    rotary_dim = cosines.shape[1]
    if rotary_dim % 2 or not 2 <= rotary_dim <= key_dim:
        raise ValueError(f"cosines: expected an even number of 2 to {key_dim} dimensions, got {list(cosines.shape)}")
    check_tensor("sines", sines, (num_tokens, rotary_dim), FLOATS, key.device)
