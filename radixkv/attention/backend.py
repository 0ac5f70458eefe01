"""The interface of attention backends, which plan batches over one pool and compute their attention layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.options import AttentionOptions, NewTokens
from radixkv.attention.query_batch import QueryBatch
from radixkv.cache import BlockCopy


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The largest batches that a backend must handle.

    Attributes:
        max_num_seqs: sequences per batch.
        max_model_len: tokens per sequence.
        max_draft_rows: rows of drafts in a decoding batch, beside its sequences' own rows.
    """

    max_num_seqs: int
    max_model_len: int
    max_draft_rows: int = 0


class AttentionBatch(Protocol):
    """Attention over one batch.

    Attributes:
        order: int64 ``[sequences]``: indices of the query batch's sequences, in the order of their rows in the packed batch.
        row_starts: int64 ``[sequences + 1]``: the rows of ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        positions: int64 ``[rows]``, each row's position in its sequence, on the model's device.
    """

    order: NDArray[np.int64]
    row_starts: NDArray[np.int64]

    @property
    def positions(self) -> torch.Tensor: ...

    def attend(self, layer: int, new: NewTokens, options: AttentionOptions) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend.

        Args:
            layer: of the pool.
            new: the batch's new tokens, row by row.
            options: the layer's.

        Returns:
            ``[1, rows, query heads, value dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """Plans batches over one pool, and copies its blocks."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order: a later one may read what an earlier one wrote."""
        ...

    def prepare(self, batch: QueryBatch) -> AttentionBatch:
        """Attention over one batch, for all layers. It is valid until the next call.

        Raises:
            ValueError: the batch is invalid (see `QueryBatch.check`), or exceeds the sequences or blocks that the backend was
                made for; nothing has changed then.
        """
        ...
