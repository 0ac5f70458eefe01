"""The plan carried out by Triton kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from radixkv.attention.batch_buffers import DeviceRows
from radixkv.attention.device_plan import DevicePlan, DevicePlanner
from radixkv.attention.lowering import DeviceItems, HeadShape
from radixkv.attention.plan import QueryChunk
from radixkv.cache import BlockCopy
from radixkv.memory import KVPool
from radixkv_kernels import (
    BLOCK_SIZES,
    BlockCopier,
    attend_items,
    attend_split,
    merge_partials,
    merge_splits,
    write_cache,
)


class TritonBackend:
    """Plans batches over one pool and attends them.

    Args:
        pool: where keys and values lie.
        dtype: of queries.
        num_query_heads: of the first layer, by which sharing is weighed.
        max_sequences: in a batch.
        max_model_len: tokens of a sequence at most.

    Raises:
        ValueError: the kernels cannot take the pool's blocks.
    """

    def __init__(
        self, pool: KVPool, dtype: torch.dtype, num_query_heads: int, max_sequences: int, max_model_len: int
    ) -> None:
        if pool.block_size not in BLOCK_SIZES:
            raise ValueError(f"block_size: expected one of {BLOCK_SIZES} with Triton's kernels, got {pool.block_size}")
        self._pool = pool
        self._copier = BlockCopier([*pool.keys, *pool.values])
        layer = pool.layers[0]
        device = pool.keys[0].device
        on_gpu = device.type == "cuda"
        self._planner = DevicePlanner(
            max_sequences=max_sequences,
            max_blocks=-(-max_model_len // pool.block_size),
            block_size=pool.block_size,
            shape=HeadShape(layer.num_kv_heads, num_query_heads // layer.num_kv_heads),
            bytes_per_token=layer.elements_per_token * pool.dtype.itemsize,
            element_bytes=pool.dtype.itemsize,
            dtype=dtype,
            device=device,
            multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
        )

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order, all layers in one launch."""
        self._copier.copy([(copy.source, copy.target, copy.num_tokens) for copy in copies])

    def prepare(self, chunks: Sequence[QueryChunk]) -> TritonAttention:
        """Attention over one batch, for all layers.

        Raises:
            ValueError: the chunks are no batch that there is room for.
        """
        return TritonAttention(self._planner.plan(chunks), self._pool)


class TritonAttention:
    """Attention over one batch for all layers; an `AttentionBatch`."""

    def __init__(self, plan: DevicePlan, pool: KVPool) -> None:
        self.plan = plan
        self.order = plan.order
        self.row_starts = plan.row_starts
        self._pool = pool
        self._partials = PartialResults(plan.rows.positions.device)

    @property
    def positions(self) -> torch.Tensor:
        """int64 ``[rows]`` on the device."""
        return self.plan.rows.positions.long()

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        softcap: float | None = None,
        sliding_window: int | None = None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend; see `AttentionBatch.attend`."""
        plan, rows, tables = self.plan, self.plan.rows, self.plan.buffers.tables
        shape = HeadShape(key.shape[1], query.shape[1] // key.shape[1])
        splits = plan.splits(shape)
        if splits is None:
            return attend_layer(
                self._pool, layer, query, key, value, rows, tables, plan.items(shape), self._partials,
                scale=scale, softcap=softcap, sliding_window=sliding_window, sinks=sinks,
            )  # fmt: skip
        keys, values, query_rows, output = _store(self._pool, layer, query, key, value, rows.slots)
        key_scales, value_scales = self._pool.scales(layer)
        partials = self._partials.of(len(query_rows) * splits if splits > 1 else 0, output)
        attend_split(
            query_rows, keys, values, tables, rows.row_tables, rows.positions, output, *partials,
            num_splits=splits, scale=scale, softcap=softcap, window=sliding_window, sinks=sinks,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
        if splits > 1:
            merge_splits(*partials, output, num_splits=splits, sinks=sinks)
        return output.unsqueeze(0)


class PartialResults:
    """Room for partial results, shared by all layers: each is done with it before the next begins."""

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


def attend_layer(
    pool: KVPool,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rows: DeviceRows,
    tables: torch.Tensor,
    items: DeviceItems,
    partial_results: PartialResults,
    *,
    scale: float,
    softcap: float | None,
    sliding_window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One layer over work items: write, attend every tile class, merge; arguments otherwise as `AttentionBatch.attend`'s."""
    keys, values, query_rows, output = _store(pool, layer, query, key, value, rows.slots)
    key_scales, value_scales = pool.scales(layer)
    partials = partial_results.of(items.num_partials, output)
    for tile, own in items.by_tile.items():
        attend_items(
            query_rows, keys, values, tables, rows.positions, own, output, *partials,
            tile_rows=tile, scale=scale, softcap=softcap, window=sliding_window, sinks=sinks,
            key_scales=key_scales, value_scales=value_scales,
        )  # fmt: skip
    if items.num_partials:
        merge_partials(*partials, items.starts, items.partials, rows.positions, output, sinks=sinks)
    return output.unsqueeze(0)


def _store(
    pool: KVPool, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, slots: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Write the new keys and values; returns the layer's caches, the query by rows, and room for the output."""
    keys, values = pool.keys[layer], pool.values[layer]
    key_scales, value_scales = pool.scales(layer)
    write_cache(
        key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, slots,
        key_scales=key_scales, value_scales=value_scales,
    )  # fmt: skip
    rows = query[0].transpose(0, 1)
    output = torch.empty(*rows.shape[:2], value.shape[3], dtype=query.dtype, device=query.device)
    return keys, values, rows, output
