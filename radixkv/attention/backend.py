"""The interface of attention backends, which plan batches over one pool and compute their attention layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.attention.options import AttentionOptions, Rotary
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

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        options: AttentionOptions,
        rotary: Rotary | None = None,
    ) -> torch.Tensor:
        """Write the batch's new keys and values into the pool, then attend.

        Args:
            query: ``[1, query heads, rows, key dim]``.
            key: ``[1, kv heads, rows, key dim]``, the new tokens only.
            value: ``[1, kv heads, rows, value dim]``, likewise.
            options: the layer's.
            rotary: by which queries and new keys are rotated first, on a GPU; None, as always on a CPU: they are already.

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
