"""The kernels' results in plain torch and float64, slow and simple, to compare kernels with.

Every function takes its kernel's arguments and writes the same outputs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from radixkv_kernels.work_items import NO_PARTIAL


def write_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slots: torch.Tensor,
    *,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `cache_write.write_cache`."""
    block_size = key_cache.shape[1]
    for source, cache, scales in ((key, key_cache, key_scales), (value, value_cache, value_scales)):
        for token, slot in enumerate(slots.tolist()):
            if slot < 0:
                continue
            row = source[token] if scales is None else (source[token] / scales[:, None]).clamp(-448, 448)
            cache[slot // block_size, slot % block_size] = row.to(cache.dtype)


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
) -> None:
    """See `rotary_cache_write.rotate_and_write`."""
    turned_heads = []
    for heads in (query, key):
        turning = heads[..., : cosines.shape[1]].double()
        first, second = turning.chunk(2, dim=-1)
        turned = turning * cosines.double()[:, None] + torch.cat((-second, first), -1) * sines.double()[:, None]
        turned_heads.append(torch.cat((turned.to(heads.dtype), heads[..., cosines.shape[1] :]), -1))
    rotated.copy_(turned_heads[0])
    write_cache(
        turned_heads[1], value, key_cache, value_cache, slots, key_scales=key_scales, value_scales=value_scales
    )  # fmt: skip


def copy_blocks(caches: Sequence[torch.Tensor], copies: Sequence[tuple[int, int, int]]) -> None:
    """See `block_copy.BlockCopier.copy`."""
    for source, target, num_tokens in copies:
        for cache in caches:
            cache[target, :num_tokens] = cache[source, :num_tokens]


def attend_items(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    tables: torch.Tensor,
    positions: torch.Tensor,
    items: torch.Tensor,
    output: torch.Tensor,
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    *,
    scale: float,
    softcap: float | None = None,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """See `item_attention.attend_items`."""
    for row_start, num_rows, table, key_start, key_stop, partial_start in items.tolist():
        for index in range(num_rows):
            row = row_start + index
            key, value = gather(
                key_cache, value_cache, tables[table], key_start,
                min(key_stop, int(positions[row]) + 1), key_scales, value_scales,
            )  # fmt: skip
            visible = torch.arange(key_start, key_start + len(key)) > int(positions[row]) - (window or 2**31)
            result, lse = attend_row(query[row], key[visible], value[visible], scale, softcap)
            if partial_start == NO_PARTIAL:
                output[row] = (result * sink_share(lse, sinks)).to(output.dtype)
            else:
                partial_output[partial_start + index] = result.float()
                partial_lse[partial_start + index] = lse.float()


def merge_partials(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    starts: torch.Tensor,
    partials: torch.Tensor,
    positions: torch.Tensor,
    output: torch.Tensor,
    *,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `merge.merge_partials`."""
    for row, position in enumerate(positions.tolist()):
        own = partials[int(starts[row]) : int(starts[row + 1])].long()
        if len(own):
            output[row] = _merged(partial_output[own], partial_lse[own], sinks).to(output.dtype)
        elif position < 0:
            output[row] = 0


def merge_splits(
    partial_output: torch.Tensor,
    partial_lse: torch.Tensor,
    output: torch.Tensor,
    *,
    num_splits: int,
    sinks: torch.Tensor | None = None,
) -> None:
    """See `merge.merge_splits`."""
    for row in range(output.shape[0]):
        own = slice(row * num_splits, (row + 1) * num_splits)
        output[row] = _merged(partial_output[own], partial_lse[own], sinks).to(output.dtype)


def gather(
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    table: torch.Tensor,
    start: int,
    stop: int,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values at the positions ``start .. stop`` of one block table, float64 ``[tokens, kv heads, dim]``."""
    position = torch.arange(start, max(start, stop))
    block_size = key_cache.shape[1]
    block, slot = table[position // block_size].long(), position % block_size
    key, value = key_cache[block, slot].double(), value_cache[block, slot].double()
    if key_scales is not None and value_scales is not None:
        key, value = key * key_scales.double()[:, None], value * value_scales.double()[:, None]
    return key, value


def attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, softcap: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One row ``[query heads, dim]`` over all of ``key``: its output and base-2 log-sum-exp, float64."""
    num_heads = query.shape[0]
    if len(key) == 0:
        return query.new_zeros(num_heads, value.shape[2], dtype=torch.float64), torch.full(
            (num_heads,), -math.inf, dtype=torch.float64
        )
    group = num_heads // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("hd,nhd->hn", query.double(), key) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    return torch.einsum("hn,nhd->hd", scores.softmax(-1), value), scores.logsumexp(-1) / math.log(2)


def sink_share(lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """The share of the softmax that keys keep beside a sink, ``[query heads, 1]``."""
    if sinks is None:
        return torch.ones(lse.shape[0], 1, dtype=torch.float64)
    return torch.sigmoid(lse.double() * math.log(2) - sinks.double()).unsqueeze(-1)


def _merged(parts: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """``[partials, heads, dim]`` and ``[partials, heads]`` as one output in float64; what saw no key is not looked at."""
    seen = (lse > -math.inf).unsqueeze(-1)
    total = torch.logsumexp(lse.double() * math.log(2), 0) / math.log(2)
    weights = torch.exp2(lse.double() - total).nan_to_num_(nan=0.0).unsqueeze(-1)
    merged = (torch.where(seen, parts.double(), 0.0) * weights).sum(0)
    return merged * sink_share(total, sinks)
