"""The kernels of one layer: write the new keys and values, attend, merge.

Where the model leaves rotation to attention, `rotate_and_write` takes the place of `write_cache`.

::

    shared    write    -> attend_items per tile class    -> merge_partials
    flat      write    -> attend_split                   -> merge_splits, where keys are split
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch

from radixkv.attention.options import AttentionOptions
from radixkv.attention.triton.buffers import DeviceRows
from radixkv.attention.triton.work_items import DeviceItems
from radixkv_kernels import (
    Launch,
    attend_items,
    attend_split,
    merge_partials,
    merge_splits,
    rotate_and_write,
    write_cache,
)

# Launches a kernel, and returns the launch if it can be repeated.
Launcher = Callable[[], Launch | None]


class LayerTensors(NamedTuple):
    """The tensors that differ from layer to layer, under the kernels' own names for them.

    Attributes:
        query: ``[rows, query heads, key dim]``; where it has yet to be rotated, memory for the result.
        key, value: ``[rows, kv heads, dim]``, the new tokens only.
        output: ``[rows, query heads, value dim]``.
        key_cache, value_cache: the pool's.
        key_scales, value_scales: of a quantised pool.
        sinks: the layer's, see `AttentionOptions`.
        unrotated: the query before rotation, where it has yet to be rotated.
        cosines, sines: for its rotation, see `Rotary`.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    key_scales: torch.Tensor | None
    value_scales: torch.Tensor | None
    sinks: torch.Tensor | None
    unrotated: torch.Tensor | None
    cosines: torch.Tensor | None
    sines: torch.Tensor | None


class PartialResults:
    """Memory for partial results, shared by all layers: each is done with it before the next begins.

    A smaller buffer is the first rows of the largest one, so the largest is best requested first.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # By heads and value dim. The last is the largest; captured graphs still use those before it.
        self._buffers: dict[tuple[int, int], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def of(self, num_partials: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """``[partials, query heads, value dim]`` and ``[partials, query heads]`` for an output's heads."""
        heads, dim = output.shape[1:]
        buffers = self._buffers.setdefault((heads, dim), [])
        if not buffers or len(buffers[-1][0]) < num_partials:
            buffers.append(
                (
                    torch.empty(num_partials, heads, dim, dtype=torch.float32, device=self._device),
                    torch.empty(num_partials, heads, dtype=torch.float32, device=self._device),
                )
            )
        partials, sums = buffers[-1]
        return partials[:num_partials], sums[:num_partials]


def shared_launchers(
    tensors: LayerTensors,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    items: DeviceItems,
    partial_results: PartialResults,
) -> list[Launcher]:
    """What one layer over work items launches, in order."""
    output, caches = tensors.output, (tensors.key_cache, tensors.value_cache)
    partials = partial_results.of(items.num_partials, output)
    launchers = [_write(tensors, rows.slots)]
    launchers += (
        partial(
            attend_items,
            tensors.query, *caches, tables, rows.positions, own, output, *partials,
            tile_rows=tile_rows, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
            sinks=options.sinks, key_scales=tensors.key_scales, value_scales=tensors.value_scales,
        )
        for tile_rows, own in sorted(items.by_tile.items(), reverse=True)
    )  # fmt: skip
    if items.num_partials:
        merge = partial(
            merge_partials, *partials, items.starts, items.partials, rows.positions, output, sinks=options.sinks
        )
        launchers.append(merge)
    return launchers


def flat_launchers(
    tensors: LayerTensors,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    num_splits: int,
    partial_results: PartialResults,
) -> list[Launcher]:
    """One layer, each of the decoding rows over all its keys in ``num_splits`` parts; otherwise as `shared_launchers`."""
    output = tensors.output
    partials = partial_results.of(len(output) * num_splits if num_splits > 1 else 0, output)
    attend = partial(
        attend_split,
        tensors.query, tensors.key_cache, tensors.value_cache, tables, rows.row_tables, rows.positions, output, *partials,
        num_splits=num_splits, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
        sinks=options.sinks, key_scales=tensors.key_scales, value_scales=tensors.value_scales,
    )  # fmt: skip
    launchers: list[Launcher] = [_write(tensors, rows.slots), attend]
    if num_splits > 1:
        launchers.append(partial(merge_splits, *partials, output, num_splits=num_splits, sinks=options.sinks))
    return launchers


def _write(tensors: LayerTensors, slots: torch.Tensor) -> Launcher:
    caches, scales = (tensors.key_cache, tensors.value_cache), (tensors.key_scales, tensors.value_scales)
    if tensors.unrotated is None or tensors.cosines is None or tensors.sines is None:
        return partial(
            write_cache, tensors.key, tensors.value, *caches, slots, key_scales=scales[0], value_scales=scales[1]
        )
    return partial(
        rotate_and_write, tensors.unrotated, tensors.key, tensors.value, tensors.cosines, tensors.sines, *caches, slots,
        tensors.query, key_scales=scales[0], value_scales=scales[1],
    )  # fmt: skip
