"""The plan carried out by native code on a CPU: keys and values are read where they lie, a shared prefix once."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.host_backend import HostBackend
from radixkv.attention.options import AttentionOptions, NewTokens
from radixkv.attention.plan import AttentionPlan, KeyRanges
from radixkv.attention.query_batch import Ints, concatenated_ranges
from radixkv.memory import KVPool
from radixkv_cpu import MAX_DECODING_ROWS, NATIVE_DTYPES, PagedAttention, RowKind, library, write_cache

KeptRows = tuple[torch.Tensor, PagedAttention]
"""Rows of a batch, int64 and ascending, and attention over these alone."""

_SHARED, _PROMPT, _DECODING = map(np.int8, RowKind)


def is_available(pool: KVPool, dtype: torch.dtype) -> bool:
    """Whether the native code runs here and takes this pool and queries of ``dtype``."""
    return (
        library() is not None and dtype in NATIVE_DTYPES and pool.dtype == dtype and pool.keys[0].device.type == "cpu"
    )


class NativeAttention:
    """Attention over one batch for all layers; an `AttentionBatch`.

    Attributes:
        slots: int64 ``[rows]``: where the new keys and values go.
        paged: over all rows.
        decoding: int64, ascending: the rows that a token of the answer follows, see `QueryBatch`.
        kept: the rows that the last layer computes to the end; None: all.
    """

    def __init__(self, plan: AttentionPlan, pool: KVPool) -> None:
        self.order = plan.order
        self.row_starts = plan.row_starts
        self.positions = torch.from_numpy(plan.positions)
        self._pool = pool
        self.slots = torch.from_numpy(plan.slots)
        row_ranges, tables, key_ranges, kinds = _by_kind(plan.ranges)
        self.paged = PagedAttention(
            row_ranges, tables, key_ranges, plan.block_ids, plan.positions, plan.block_size, kinds
        )
        self.decoding = torch.from_numpy(_decoding_rows(plan.ranges))
        self.kept: KeptRows | None = None

    def keep(self, rows: Ints) -> None:
        """Set the rows that the last layer computes to the end, in any order; all, unless this is called."""
        if len(rows) < self.paged.num_rows:
            rows = np.sort(rows)
            self.kept = torch.from_numpy(rows), self.paged.of_rows(rows)

    def attend(self, layer: int, new: NewTokens, options: AttentionOptions) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend; see `AttentionBatch.attend`."""
        query, key, value, rotary = new
        assert rotary is None
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        write_cache(_contiguous_heads(key), _contiguous_heads(value), keys, values, self.slots)
        sinks = None if options.sinks is None else options.sinks.float().contiguous()
        output = self.paged.attend(
            _contiguous_heads(query), keys, values,
            scale=options.scale, softcap=options.softcap, window=options.sliding_window, sinks=sinks,
        )  # fmt: skip
        return output.unsqueeze(0)


class NativeBackend(HostBackend):
    """Plans batches over one pool; `is_available` must hold for it."""

    # A shared prefix saves reading (sequences - 1) x tokens; merging its result costs as much as reading a few dozen tokens.
    sharing_cost_tokens = 64
    attention = NativeAttention


def _by_kind(ranges: KeyRanges) -> tuple[Ints, Ints, Ints, NDArray[np.int8]]:
    """A batch's ranges, split so that each has rows of one kind, and decoding ranges at most `MAX_DECODING_ROWS`.

    So a prompt's last token is computed as it is when the others are cached, and a token after a long draft as it is without
    one: the answer is the same either way.
    """
    row_ranges = np.stack((ranges.row_start, ranges.row_stop))
    key_ranges = np.stack((ranges.key_start, ranges.key_stop))
    num_decoding, num_rows = ranges.num_decoding, ranges.row_stop - ranges.row_start
    kinds = np.where(num_decoding > 0, _DECODING, _PROMPT)
    kinds[: ranges.num_shared] = _SHARED
    (split,) = ((num_decoding > 0) & (num_decoding < num_rows) | (num_decoding > MAX_DECODING_ROWS)).nonzero()
    if not len(split):
        return row_ranges, ranges.table, key_ranges, kinds
    num_pieces = -(-num_decoding[split] // MAX_DECODING_ROWS)
    pieces = split.repeat(num_pieces)
    starts = ranges.row_stop[pieces] - num_decoding[pieces]
    starts += MAX_DECODING_ROWS * concatenated_ranges(np.zeros_like(num_pieces), num_pieces)
    decoding_rows = np.stack((starts, np.minimum(starts + MAX_DECODING_ROWS, ranges.row_stop[pieces])))
    decoding_keys = key_ranges[:, pieces]
    for columns in (row_ranges, key_ranges):
        columns[1, split] -= num_decoding[split]  # the prompt's rows are left; none where all of them decode
    kinds[split] = _PROMPT
    return (
        np.concatenate((row_ranges, decoding_rows), axis=1),
        np.concatenate((ranges.table, ranges.table[pieces])),
        np.concatenate((key_ranges, decoding_keys), axis=1),
        np.concatenate((kinds, np.full(len(pieces), _DECODING))),
    )


def _decoding_rows(ranges: KeyRanges) -> Ints:
    """The rows that a token of the answer follows, ascending: each sequence's last ones. Private ranges are in row order."""
    stops, counts = ranges.row_stop[ranges.num_shared :], ranges.num_decoding[ranges.num_shared :]
    return concatenated_ranges(stops - counts, counts)


def _contiguous_heads(x: torch.Tensor) -> torch.Tensor:
    """``[1, heads, rows, dim]`` as ``[rows, heads, dim]``, without a copy where each head's numbers are neighbours."""
    rows = x[0].transpose(0, 1)
    return rows if rows.stride(2) == 1 else rows.contiguous()
