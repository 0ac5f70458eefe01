"""The kernels of one layer: write the new keys and values, attend, merge.

::

    shared    write_cache -> attend_items per tile class, one after the other or side by side -> merge_partials
    flat      write_cache -> attend_split                -> merge_splits, where keys are split
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from radixkv.attention.options import AttentionOptions
from radixkv.attention.triton.buffers import DeviceRows
from radixkv.attention.triton.work_items import DeviceItems
from radixkv.memory import KVPool
from radixkv_kernels import attend_items, attend_split, merge_partials, merge_splits, write_cache


class PartialResults:
    """Memory for partial results, shared by all layers: each is done with it before the next begins."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

    def of(self, num_partials: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[partials, query heads, value dim]`` and ``[partials, query heads]`` for an output's heads."""
        key = (num_partials, output.shape[1], output.shape[2])
        buffers = self._buffers.get(key)
        if buffers is None:
            buffers = self._buffers[key] = (
                torch.empty(key, dtype=torch.float32, device=self._device),
                torch.empty(key[:2], dtype=torch.float32, device=self._device),
            )
        return buffers


def run_side_by_side(launches: Sequence[Callable[[], None]], device: torch.device) -> None:
    """Launch on streams that fork from the current one and join it again, so that a CUDA graph captures them as branches.

    What they write must lie apart, and be allocated before.
    """
    current = torch.cuda.current_stream(device)
    *others, last = launches
    sides = [torch.cuda.Stream(device) for _ in others]  # torch keeps a few, and hands them out in turn
    for side, launch in zip(sides, others, strict=True):
        side.wait_stream(current)
        with torch.cuda.stream(side):
            launch()
    last()
    for side in sides:
        current.wait_stream(side)


def attend_shared(
    pool: KVPool,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    items: DeviceItems,
    partial_results: PartialResults,
    side_by_side: bool = False,
) -> torch.Tensor:
    """One layer over work items; shapes as in `AttentionBatch.attend`.

    Args:
        rows: positions, slots and tables of the query rows.
        tables: the block tables, see `BatchBuffers`.
        items: for layers of this shape.
        partial_results: memory for them.
        side_by_side: tile classes run at the same time.
    """
    query_rows, output = _write(pool, layer, query, key, value, rows.slots)
    key_scales, value_scales = pool.scales(layer)
    partials = partial_results.of(items.num_partials, output)
    several = side_by_side and len(items.by_tile) > 1
    # Wide tiles first: a program of theirs finds no room once the multiprocessors are full of narrow ones.
    launches = [
        partial(
            attend_items,
            query_rows, pool.keys[layer], pool.values[layer], tables, rows.positions, own, output, *partials,
            tile_rows=tile_rows, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
            sinks=options.sinks, key_scales=key_scales, value_scales=value_scales, beside_narrow=several,
        )
        for tile_rows, own in sorted(items.by_tile.items(), reverse=True)
    ]  # fmt: skip
    if several and output.device.type == "cuda":
        run_side_by_side(launches, output.device)
    else:
        for launch in launches:
            launch()
    if items.num_partials:
        merge_partials(*partials, items.starts, items.partials, rows.positions, output, sinks=options.sinks)
    return output.unsqueeze(0)


def attend_flat(
    pool: KVPool,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    num_splits: int,
    partial_results: PartialResults,
) -> torch.Tensor:
    """One layer, each of the decoding rows over all its keys in ``num_splits`` parts; otherwise as `attend_shared`."""
    query_rows, output = _write(pool, layer, query, key, value, rows.slots)
    key_scales, value_scales = pool.scales(layer)
    partials = partial_results.of(len(query_rows) * num_splits if num_splits > 1 else 0, output)
    attend_split(
        query_rows, pool.keys[layer], pool.values[layer], tables, rows.row_tables, rows.positions, output, *partials,
        num_splits=num_splits, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
        sinks=options.sinks, key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    if num_splits > 1:
        merge_splits(*partials, output, num_splits=num_splits, sinks=options.sinks)
    return output.unsqueeze(0)


def _write(
    pool: KVPool, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the new keys and values; returns the query as ``[rows, heads, dim]``, and memory for the output."""
    key_scales, value_scales = pool.scales(layer)
    write_cache(
        key[0].transpose(0, 1), value[0].transpose(0, 1), pool.keys[layer], pool.values[layer], slots,
        key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    rows = query[0].transpose(0, 1)
    return rows, torch.empty(*rows.shape[:2], value.shape[3], dtype=query.dtype, device=query.device)
