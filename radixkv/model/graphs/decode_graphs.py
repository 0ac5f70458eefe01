"""Decoding steps as CUDA graphs, captured when the engine starts.

There are two graphs for each padded number of rows, one with wide tiles for batches that share prefixes and one with narrow
ones; and, where batches that share nothing are so large that no row's keys are split, one without a merge. Drafts are rows
like others; with them there are a few larger sizes. What changes between steps lies in the buffers of a `PaddedDecode`. All
graphs write their logits into one buffer, and share one pool of memory.
Without a GPU, as in tests, the model runs eagerly over the same buffers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from tqdm.auto import tqdm

from radixkv.attention import AttentionBatch
from radixkv.attention.triton import TritonAttention, TritonBackend
from radixkv.attention.triton.buffers import drafting_sizes, padded_sizes
from radixkv.attention.triton.cost_model import Tiling, max_tiles, whole_from
from radixkv.attention.triton.launches import PartialResults
from radixkv.attention.triton.padded_decode import PaddedDecode
from radixkv.model.graphs.cuda_graph import GraphCapture, Replay

_log = logging.getLogger(__name__)

# After so long no further capture begins; batches of the missing sizes run in larger graphs.
MAX_CAPTURE_SECONDS = 120.0

# The model's logits ``[rows, vocabulary]`` for every row of a padded batch, sequences in the query batch's order.
Forward = Callable[[PaddedDecode], torch.Tensor]
# Runs work once, and returns what runs it again.
Capture = Callable[[Callable[[], object]], Replay]


class GraphKind(NamedTuple):
    """What a graph is captured for.

    Attributes:
        size: rows, padding included.
        wide: takes the widest tiles that so many rows may need, in which any batch runs; otherwise the narrowest, for batches
            that share nothing, or whose prefixes few rows share, and for any batch if its size or type has no wider tiles.
        whole: only for batches that share nothing, and none of whose rows is split.
    """

    size: int
    wide: bool = False
    whole: bool = False


class DecodeGraphs:
    """Runs decoding batches of one model.

    Args:
        backend: plans the batches.
        forward: runs the model on a `PaddedDecode`.
        max_num_seqs: sequences in a batch at most.
        max_draft_rows: rows of drafts that a batch may have beside their own.
        groups: query heads per key-value head, of all layers.
        capture: how work is captured; None: as CUDA graphs on a GPU, not at all elsewhere.
        clock: seconds.

    Attributes:
        kinds: all graphs that there will be, in the order in which they are captured.
    """

    def __init__(
        self,
        backend: TritonBackend,
        forward: Forward,
        max_num_seqs: int,
        max_draft_rows: int = 0,
        *,
        groups: Iterable[int],
        capture: Capture | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        device = backend.pool.keys[0].device
        if capture is None:
            capture = GraphCapture(device) if device.type == "cuda" else _run_eagerly
        fewest_heads = min(layer.num_kv_heads for layer in backend.pool.layers)
        has_wide = partial(_has_wide_tiles, groups=frozenset(groups), dtype=backend.dtype, tiling=backend.tiling)
        self.kinds = kinds_in_order(max_num_seqs, max_draft_rows, has_wide, whole_from(fewest_heads, backend.tiling))
        self._backend = backend
        self._forward = forward
        self._capture = capture
        self._clock = clock
        self._partials = PartialResults(device)
        self._logits: torch.Tensor | None = None
        self._captured: dict[GraphKind, tuple[PaddedDecode, Replay]] = {}
        # By how many rows a batch has, and whether it is flat: the best first.
        self._for_batch: dict[tuple[int, bool], list[GraphKind]] = {}

    @property
    def num_captured(self) -> int:
        """How many graphs there are."""
        return len(self._captured)

    def capture(self, kinds: Sequence[GraphKind] | None = None) -> None:
        """Capture graphs, with a progress bar on a terminal, for `MAX_CAPTURE_SECONDS` at most.

        If one cannot be captured, a warning says so, all are given up, and every batch will be run eagerly.

        Args:
            kinds: which ones; None: all.
        """
        try:
            self._capture_all(self.kinds if kinds is None else kinds)
        except RuntimeError as error:  # torch's for lack of memory is one, too
            _log.warning("decoding runs without CUDA graphs, which could not be captured: %s", error)
            self._captured.clear()
            self._logits = None
            self._partials = PartialResults(self._backend.pool.keys[0].device)
        self._for_batch = _choices(self._captured)

    def _capture_all(self, kinds: Sequence[GraphKind]) -> None:
        end = self._clock() + MAX_CAPTURE_SECONDS
        for kind in tqdm(kinds, desc="CUDA graphs", disable=None, leave=False):
            if self._captured and self._clock() > end:
                _log.warning(
                    "%d of %d CUDA graphs were captured in %.0f s: batches of other sizes run in larger ones",
                    len(self._captured), len(self.kinds), MAX_CAPTURE_SECONDS,
                )  # fmt: skip
                return
            padded = PaddedDecode(kind.size, self._backend, kind.wide, self._partials, kind.whole)
            self._captured[kind] = padded, self._capture(partial(self._compute, padded))

    def run(self, token_ids: torch.Tensor, batch: AttentionBatch) -> torch.Tensor | None:
        """Float32 logits ``[rows, vocabulary]`` in the query batch's order; None: run this batch eagerly.

        Args:
            token_ids: int64, one per row in the batch's order, on the device.
            batch: of which every row's logits are wanted.
        """
        assert isinstance(batch, TritonAttention)
        kinds = self._for_batch.get((len(token_ids), batch.plan.is_flat), ())
        kind = next((kind for kind in kinds if self._captured[kind][0].load(batch)), None)
        if kind is None:
            return None
        padded, replay = self._captured[kind]
        padded.token_ids[: len(token_ids)].copy_(token_ids, non_blocking=True)
        replay()
        assert self._logits is not None
        # Always a copy: the next batch may be launched while these logits are still in use.
        return self._logits[: len(token_ids)].to(torch.float32, copy=True)

    def _compute(self, padded: PaddedDecode) -> None:
        logits = self._forward(padded)
        if self._logits is None:  # outside any graph: before it is captured, work is run
            self._logits = logits.new_empty(max(kind.size for kind in self.kinds), logits.shape[1])
        self._logits[: padded.num_rows].copy_(logits)


def _has_wide_tiles(num_rows: int, groups: Iterable[int], dtype: torch.dtype, tiling: Tiling) -> bool:
    """Whether a layer of a batch of up to so many rows may take wider tiles than its narrowest.

    Args:
        groups: query heads per key-value head, of the layers.
        dtype: of queries.
        tiling: on the GPU.
    """
    return any(len(max_tiles(num_rows, group, dtype, tiling)) > 1 for group in groups)


def kinds_in_order(
    max_num_seqs: int, max_draft_rows: int, has_wide: Callable[[int], bool], whole_from: int
) -> list[GraphKind]:
    """The graphs for batches of up to ``max_num_seqs``, the most useful first in case time is up before the last.

    The largest is the first: it takes the memory that all use, and can stand in for each of them. Then the largest without
    drafts, and powers of two.

    Args:
        max_draft_rows: rows of drafts that a batch may have beside its sequences' own.
        has_wide: whether batches of up to so many rows may have wide tiles.
        whole_from: from this size on, there is also one for batches none of whose rows is split.
    """
    sizes, with_drafts = padded_sizes(max_num_seqs), drafting_sizes(max_num_seqs, max_draft_rows)
    order = sorted(sizes, key=lambda size: (size != sizes[-1], size & (size - 1) != 0, -size))
    kinds = [GraphKind(size, wide) for size in order for wide in dict.fromkeys((has_wide(size), False))]
    drafting = [GraphKind(size, has_wide(size)) for size in reversed(with_drafts)]
    return [
        *drafting[:1],
        *kinds,
        *drafting[1:],
        *(GraphKind(size, whole=True) for size in order if size >= whole_from),
    ]


def _choices(captured: Iterable[GraphKind]) -> dict[tuple[int, bool], list[GraphKind]]:
    """For each number of rows, flat or not, the smallest graphs that take them, those with the least work first.

    Each list ends with the first graph that takes any such batch: for flat batches one that merges, for others also with the
    widest tiles of its size.
    """
    in_order = sorted(captured, key=lambda kind: (kind.size, not kind.whole, kind.wide))
    widest = {kind.size: kind for kind in in_order if not kind.whole}
    chosen: dict[tuple[int, bool], list[GraphKind]] = {}
    is_complete: set[tuple[int, bool]] = set()
    for kind in in_order:
        for num_rows, is_flat in itertools.product(range(1, kind.size + 1), (True, False)):
            batch = num_rows, is_flat
            if batch in is_complete or (kind.whole and not is_flat):
                continue
            chosen.setdefault(batch, []).append(kind)
            if not kind.whole and (is_flat or kind == widest[kind.size]):
                is_complete.add(batch)
    return chosen


def _run_eagerly(work: Callable[[], object]) -> Replay:
    work()
    return work
