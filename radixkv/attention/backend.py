"""What an attention backend is: it plans batches over one pool, and attends each for all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from radixkv.attention.plan import QueryChunk
from radixkv.cache import BlockCopy


class AttentionBatch(Protocol):
    """Attention over one batch.

    Attributes:
        order: chunk indices in the order in which their rows stand in the packed batch.
        row_starts: ``[chunks + 1]``: the rows of the chunk ``order[i]`` are ``row_starts[i] .. row_starts[i + 1]``.
        positions: int64 ``[rows]``, each row's position in its sequence, where the model runs.
    """

    order: list[int]
    row_starts: list[int]

    @property
    def positions(self) -> torch.Tensor: ...

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
        """Write the batch's new keys and values into the pool, then attend.

        Args:
            query: ``[1, query heads, rows, key dim]``.
            key, value: ``[1, kv heads, rows, dim]``, the new tokens only.
            sliding_window: how many tokens a row sees, itself included; None: all.
            sinks: ``[query heads]``, a logit a head that takes part in the softmax and has no value (gpt-oss).

        Returns:
            ``[1, rows, query heads, value dim]``.
        """
        ...


class AttentionBackend(Protocol):
    """Plans batches over one pool, and copies its blocks."""

    def copy_blocks(self, copies: Iterable[BlockCopy]) -> None:
        """Carry out the cache's queued copies, in order: a later one may read what an earlier one wrote."""
        ...

    def prepare(self, chunks: Sequence[QueryChunk]) -> AttentionBatch:
        """Attention over one batch, for all layers; the one before must be done with.

        Raises:
            ValueError: the chunks are no batch that there is room for.
        """
        ...
