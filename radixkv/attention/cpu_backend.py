"""The plan carried out with torch on a CPU.

Lowering turns a plan's items into calls, once a batch and sliding window, and every layer repeats those calls:

- a run of consecutive blocks is attended in place, as a view of the pool (`_ViewCall`);
- scattered blocks, and the short private tails of many decoding sequences together, are gathered into one batch first
  (`_GatherCall`);
- a prompt's new tokens attend to themselves causally, straight from what was written (`_CausalCall`).

The heads of a group are folded into the query rows, so a key is read once for all of them. Partial results are merged
into ``[rows, kv heads, group, dim]``, the layout that the model wants back.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.cost_model import MIN_BATCH_FILL, view_pays
from radixkv.attention.partial import Visibility, attend
from radixkv.attention.plan import AttentionPlan, QueryChunk, WorkItem, build_plan
from radixkv.cache import BlockCopy
from radixkv.memory import KVPool

Rows = slice | torch.Tensor


@dataclass(slots=True)
class _Call:
    """Common to all calls: the query rows, and whether their result is the first that these rows get."""

    rows: Rows
    first: bool


@dataclass(slots=True)
class _ViewCall(_Call):
    """All of ``rows`` over the consecutive token rows ``start .. stop`` of the pool."""

    start: int
    stop: int
    visibility: Visibility | None  # None: all of them


@dataclass(slots=True)
class _GatherCall(_Call):
    """Row by row, or all rows over one run: ``slots`` is ``[sequences, keys]``, the pool's token rows of each."""

    slots: torch.Tensor
    visibility: Visibility | None  # None: all of them


@dataclass(slots=True)
class _CausalCall(_Call):
    """The rows over themselves; ``visibility`` only where a sliding window cuts the triangle."""

    visibility: Visibility | None


class CpuBackend:
    """Plans batches over one pool, whose tensors must be on the CPU."""

    def __init__(self, pool: KVPool) -> None:
        self._pool = pool

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order."""
        self._pool.copy_blocks(copies)

    def prepare(self, chunks: Sequence[QueryChunk]) -> CpuAttention:
        """Attention over one batch, for all layers.

        Raises:
            ValueError: the chunks are no batch.
        """
        return CpuAttention(build_plan(chunks, self._pool.block_size), self._pool)


class CpuAttention:
    """Attention over one batch for all layers; an `AttentionBatch`."""

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        self.order = plan.order
        self.row_starts = plan.row_starts
        self.positions = torch.from_numpy(plan.positions)
        self._plan = plan
        self._pool = pool
        self._slots = torch.from_numpy(plan.slots)
        self._calls: dict[int | None, list[_Call]] = {}

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
        pool = self._pool
        stored = pool.write(layer, self._slots, key[0].transpose(0, 1), value[0].transpose(0, 1))
        num_query_heads, num_rows = query.shape[1], query.shape[2]
        num_kv_heads, value_dim = key.shape[1], value.shape[3]
        group = num_query_heads // num_kv_heads
        # [kv heads, rows, group, dim]: rows of a slice and their group are one matrix a head.
        folded = query[0].unflatten(0, (num_kv_heads, group)).transpose(1, 2)
        calls = self._lower(sliding_window)
        merged: torch.Tensor | None = None
        merged_lse: torch.Tensor | None = None

        for call in calls:
            if isinstance(call, _CausalCall):
                keys, values = (rows[call.rows].transpose(0, 1).unsqueeze(0) for rows in stored)
                output, lse = attend(
                    query[:, :, call.rows], keys, values,
                    scale=scale, softcap=softcap, causal=call.visibility is None, visibility=call.visibility,
                )  # fmt: skip
                output = output[0].unflatten(0, (num_kv_heads, group)).permute(2, 0, 1, 3)
                lse = lse[0].unflatten(0, (num_kv_heads, group)).permute(2, 0, 1)
            elif isinstance(call, _ViewCall):
                keys, values = (rows.transpose(0, 1).unsqueeze(0) for rows in pool.read(layer, call.start, call.stop))
                rows = folded[:, call.rows].flatten(1, 2).unsqueeze(0)
                output, lse = attend(
                    rows, keys, values, scale=scale, softcap=softcap, visibility=call.visibility, group=group
                )
                output = output[0].unflatten(1, (-1, group)).transpose(0, 1)
                lse = lse[0].unflatten(1, (-1, group)).transpose(0, 1)
            else:
                assert isinstance(call, _GatherCall)
                num_sequences, num_keys = call.slots.shape
                shape = (num_sequences, num_keys, num_kv_heads, -1)
                gathered = pool.gather(layer, call.slots.view(-1))
                keys, values = (rows.view(shape).transpose(1, 2) for rows in gathered)
                # [sequences, kv heads, rows of each x group, dim]
                rows = folded[:, call.rows].unflatten(1, (num_sequences, -1)).transpose(0, 1).flatten(2, 3)
                output, lse = attend(
                    rows, keys, values, scale=scale, softcap=softcap, visibility=call.visibility, group=group
                )
                output = output.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)
                lse = lse.unflatten(2, (-1, group)).transpose(1, 2).flatten(0, 1)

            if len(calls) == 1:
                merged, merged_lse = output, lse
                break
            if merged is None or merged_lse is None:
                merged = torch.zeros(num_rows, num_kv_heads, group, value_dim)
                merged_lse = torch.full((num_rows, num_kv_heads, group), float("-inf"))
            _merge(merged, merged_lse, call, output, lse)

        assert merged is not None and merged_lse is not None
        if sinks is not None:
            # A sink adds exp(sink) to the softmax's denominator: the output shrinks by lse's share of the whole.
            share = torch.sigmoid(merged_lse - sinks.float().view(num_kv_heads, group))
            merged = merged * share.unsqueeze(-1)
        return merged.reshape(1, num_rows, num_query_heads, value_dim).to(query.dtype)

    def _lower(self, window: int | None) -> list[_Call]:
        calls = self._calls.get(window)
        if calls is None:
            calls = self._calls[window] = list(_lower(self._plan, window))
        return calls


def _merge(
    merged: torch.Tensor, merged_lse: torch.Tensor, call: _Call, output: torch.Tensor, lse: torch.Tensor
) -> None:
    """Weigh a partial result into what its rows have so far (online softmax, Milakov and Gimelshein 2018)."""
    if call.first:
        merged[call.rows] = output.to(merged.dtype)
        merged_lse[call.rows] = lse
        return
    before, before_lse = merged[call.rows], merged_lse[call.rows]
    # Where neither side has seen a key, both are minus infinity: the weight would be NaN, and 0 keeps the row empty.
    weight = torch.sigmoid(lse - before_lse).nan_to_num_(nan=0.0)
    merged[call.rows] = torch.lerp(before, output.to(merged.dtype), weight.unsqueeze(-1))
    merged_lse[call.rows] = torch.logaddexp(before_lse, lse)


def _lower(plan: AttentionPlan, window: int | None) -> Iterator[_Call]:
    covered = np.zeros(plan.num_rows, dtype=bool)
    tails: list[tuple[WorkItem, int]] = []
    for item in plan.items:
        if item.causal:
            first = not covered[item.row_start : item.row_stop].any()
            yield _CausalCall(slice(item.row_start, item.row_stop), first, _causal_window(item, window))
            covered[item.row_start : item.row_stop] = True
            continue
        lowest = plan.positions[item.row_start : item.row_stop] - (window or 0) + 1
        start = item.key_start if window is None else max(item.key_start, int(lowest.min()))
        if start >= item.key_stop:
            continue
        if item.num_rows == 1 and item.key_stop == plan.positions[item.row_start] + 1:
            tails.append((item, start))
            continue
        visibility = None
        if window is not None and lowest.max() > start:
            visibility = Visibility(torch.from_numpy(np.arange(start, item.key_stop)[None, :] >= lowest[:, None]))
        yield from _lower_item(item, start, visibility, plan.block_size, covered)
    yield from _lower_tails(tails, plan.block_size, covered)


def _causal_window(item: WorkItem, window: int | None) -> Visibility | None:
    if window is None or item.num_rows <= window:
        return None
    triangle = torch.ones(item.num_rows, item.num_rows, dtype=torch.bool).tril_()
    return Visibility(triangle.triu_(1 - window))


def _lower_item(
    item: WorkItem, start: int, visibility: Visibility | None, block_size: int, covered: NDArray[np.bool_]
) -> Iterator[_Call]:
    """One item's rows over its keys from ``start`` on: views of its runs where they are long, one gather where not."""
    rows = slice(item.row_start, item.row_stop)
    slots = _slots(item, start, block_size)
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    first = not covered[rows].any()
    covered[rows] = True
    if len(breaks) == 0 or view_pays(len(breaks) + 1, len(slots)):
        borders = [0, *breaks.tolist(), len(slots)]
        for low, high in itertools.pairwise(borders):
            part = None if visibility is None else visibility.keys(low, high)
            yield _ViewCall(rows, first and low == 0, int(slots[low]), int(slots[high - 1]) + 1, part)
    else:
        yield _GatherCall(rows, first, torch.from_numpy(slots).unsqueeze(0), visibility)


def _lower_tails(tails: list[tuple[WorkItem, int]], block_size: int, covered: NDArray[np.bool_]) -> Iterator[_Call]:
    """The decoding rows' own keys: long ones in place, the others gathered with those of about their length."""
    tails = sorted(tails, key=lambda tail: tail[1] - tail[0].key_stop)
    while tails:
        longest = tails[0][0].key_stop - tails[0][1]
        size = 1
        while size < len(tails) and tails[size][0].key_stop - tails[size][1] >= MIN_BATCH_FILL * longest:
            size += 1
        batch, tails = tails[:size], tails[size:]
        if size == 1 or view_pays(1, longest):
            for item, start in batch:
                yield from _lower_item(item, start, None, block_size, covered)
            continue
        batch.sort(key=lambda tail: tail[0].row_start)
        row_ids = [item.row_start for item, _ in batch]
        lengths = np.array([item.key_stop - start for item, start in batch])
        # Padding repeats a sequence's own first key, never memory that nobody wrote.
        slots = np.empty((size, longest), dtype=np.int64)
        for line, (item, start) in zip(slots, batch, strict=True):
            own = _slots(item, start, block_size)
            line[: len(own)] = own
            line[len(own) :] = own[0]
        visibility = None
        if lengths.min() < longest:
            visibility = Visibility(torch.from_numpy(np.arange(longest)[None, None, :] < lengths[:, None, None]))
        first = not covered[row_ids].any()
        covered[row_ids] = True
        consecutive = row_ids[-1] - row_ids[0] == size - 1
        rows: Rows = slice(row_ids[0], row_ids[-1] + 1) if consecutive else torch.tensor(row_ids)
        yield _GatherCall(rows, first, torch.from_numpy(slots), visibility)


def _slots(item: WorkItem, start: int, block_size: int) -> NDArray[np.int64]:
    """The pool's token rows of the item's keys from position ``start`` on."""
    low = start // block_size
    blocks = item.block_ids[low : -(-item.key_stop // block_size)].astype(np.int64)
    rows = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
    return rows[start - low * block_size : item.key_stop - low * block_size]
