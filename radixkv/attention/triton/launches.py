"""The kernels of one layer: write the new keys and values, attend, merge.

Where the model leaves rotation to it, `rotate_and_write` stands in for `write_cache`.

::

    shared    write    -> attend_items per tile class, one after the other or side by side -> merge_partials
    flat      write    -> attend_split                -> merge_splits, where keys are split
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

# Launches a kernel, and returns the launch where it can be repeated.
Launcher = Callable[[], Launch | None]
# What is launched one after the other; several in one stage run side by side.
Stages = list[list[Launcher]]


class LayerTensors(NamedTuple):
    """What kernels read and write that is another layer's own, under the names that kernels have for it.

    Attributes:
        query: ``[rows, query heads, key dim]``; where it has to be rotated, memory for that.
        key: ``[rows, kv heads, key dim]``, the new tokens only.
        value: ``[rows, kv heads, value dim]``, likewise.
        output: ``[rows, query heads, value dim]``.
        key_cache: the pool's.
        value_cache: likewise.
        key_scales: of a quantised pool.
        value_scales: likewise.
        sinks: the layer's, see `AttentionOptions`.
        unrotated: the query as it comes, where it has to be rotated.
        cosines: for it, see `AttentionOptions`.
        sines: likewise.
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


def shared_stages(
    tensors: LayerTensors,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    items: DeviceItems,
    partial_results: PartialResults,
    side_by_side: bool = False,
) -> Stages:
    """One layer over work items.

    Args:
        tensors: the layer's.
        options: likewise.
        rows: positions, slots and tables of the query rows.
        tables: the block tables, see `BatchBuffers`.
        items: for layers of this shape.
        partial_results: memory for them.
        side_by_side: tile classes run at the same time.
    """
    output, caches = tensors.output, (tensors.key_cache, tensors.value_cache)
    partials = partial_results.of(items.num_partials, output)
    several = side_by_side and len(items.by_tile) > 1
    # Wide tiles first: a program of theirs finds no room once the multiprocessors are full of narrow ones.
    attend: list[Launcher] = [
        partial(
            attend_items,
            tensors.query, *caches, tables, rows.positions, own, output, *partials,
            tile_rows=tile_rows, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
            sinks=options.sinks, key_scales=tensors.key_scales, value_scales=tensors.value_scales,
            beside_narrow=several,
        )
        for tile_rows, own in sorted(items.by_tile.items(), reverse=True)
    ]  # fmt: skip
    stages = [[_write(tensors, rows.slots)], *([attend] if several else ([launcher] for launcher in attend))]
    if items.num_partials:
        merge = partial(
            merge_partials, *partials, items.starts, items.partials, rows.positions, output, sinks=options.sinks
        )
        stages.append([merge])
    return stages


def flat_stages(
    tensors: LayerTensors,
    options: AttentionOptions,
    rows: DeviceRows,
    tables: torch.Tensor,
    num_splits: int,
    partial_results: PartialResults,
) -> Stages:
    """One layer, each of the decoding rows over all its keys in ``num_splits`` parts; otherwise as `shared_stages`."""
    output = tensors.output
    partials = partial_results.of(len(output) * num_splits if num_splits > 1 else 0, output)
    attend = partial(
        attend_split,
        tensors.query, tensors.key_cache, tensors.value_cache, tables, rows.row_tables, rows.positions, output, *partials,
        num_splits=num_splits, scale=options.scale, softcap=options.softcap, window=options.sliding_window,
        sinks=options.sinks, key_scales=tensors.key_scales, value_scales=tensors.value_scales,
    )  # fmt: skip
    stages: Stages = [[_write(tensors, rows.slots)], [attend]]
    if num_splits > 1:
        stages.append([partial(merge_splits, *partials, output, num_splits=num_splits, sinks=options.sinks)])
    return stages


def _write(tensors: LayerTensors, slots: torch.Tensor) -> Launcher:
    caches, scales = (tensors.key_cache, tensors.value_cache), (tensors.key_scales, tensors.value_scales)
    if tensors.unrotated is None or tensors.cosines is None or tensors.sines is None:
        return partial(
            write_cache, tensors.key, tensors.value, *caches, slots, key_scales=scales[0], value_scales=scales[1]
        )
    return partial(
        rotate_and_write, tensors.unrotated, tensors.key, tensors.value, tensors.cosines, tensors.sines, *caches, slots,
        key_scales=scales[0], value_scales=scales[1], rotated=tensors.query,
    )  # fmt: skip


def run_stages(stages: Stages, device: torch.device) -> list[list[Launch | None]]:
    """Launch one stage after the other; what each launcher returned."""
    return [
        [launcher() for launcher in stage]
        if len(stage) == 1 or device.type != "cuda"
        else run_side_by_side(stage, device)
        for stage in stages
    ]


def run_side_by_side(launchers: Sequence[Launcher], device: torch.device) -> list[Launch | None]:
    """Launch on streams that fork from the current one and join it again, so that a CUDA graph captures them as branches.

    What they write must lie apart, and be allocated before.
    """
    current = torch.cuda.current_stream(device)
    *others, last = launchers
    sides: list[torch.cuda.Stream] = []
    while len(sides) < len(others):
        # torch keeps 32, and hands them out in turn: the current one, on which graphs are captured, is one of them.
        side = torch.cuda.Stream(device)
        if side != current and side not in sides:
            sides.append(side)
    launches = []
    for side, launcher in zip(sides, others, strict=True):
        side.wait_stream(current)
        with torch.cuda.stream(side):
            launches.append(launcher())
    launches.append(last())
    for side in sides:
        current.wait_stream(side)
    return launches
