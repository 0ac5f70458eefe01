"""The plan carried out by Triton kernels, on a GPU or in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from radixkv.attention.device_plan import DevicePlan, DevicePlanner, HeadShape
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
        self.positions = plan.positions.long()
        self._pool = pool
        self._partials: dict[tuple[int, int, int], tuple[torch.Tensor, torch.Tensor]] = {}

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
        plan, pool = self.plan, self._pool
        keys, values = pool.keys[layer], pool.values[layer]
        write_cache(key[0].transpose(0, 1), value[0].transpose(0, 1), keys, values, plan.slots)
        rows = query[0].transpose(0, 1)
        num_rows, num_heads, _ = rows.shape
        shape = HeadShape(key.shape[1], num_heads // key.shape[1])
        output = torch.empty(num_rows, num_heads, value.shape[3], dtype=query.dtype, device=query.device)
        splits = plan.splits(shape)
        if splits is not None:
            partials = self._partial_results(num_rows * splits if splits > 1 else 0, output)
            attend_split(
                rows, keys, values, plan.tables, plan.row_tables, plan.positions, output, *partials,
                num_splits=splits, scale=scale, softcap=softcap, window=sliding_window, sinks=sinks,
            )  # fmt: skip
            if splits > 1:
                merge_splits(*partials, output, num_splits=splits, sinks=sinks)
            return output.unsqueeze(0)
        items = plan.items(shape)
        partials = self._partial_results(items.num_partials, output)
        for tile, own in items.by_tile.items():
            attend_items(
                rows, keys, values, plan.tables, plan.positions, own, output, *partials,
                tile_rows=tile, scale=scale, softcap=softcap, window=sliding_window, sinks=sinks,
            )  # fmt: skip
        if items.num_partials:
            merge_partials(*partials, items.starts, items.partials, plan.positions, output, sinks=sinks)
        return output.unsqueeze(0)

    def _partial_results(self, num_partials: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Room for partial results, shared by all layers: each is done with it before the next begins."""
        key = (num_partials, output.shape[1], output.shape[2])
        partials = self._partials.get(key)
        if partials is None:
            partials = self._partials[key] = (
                torch.empty(key, dtype=torch.float32, device=output.device),
                torch.empty(key[:2], dtype=torch.float32, device=output.device),
            )
        return partials
