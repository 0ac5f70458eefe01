"""Penalties on tokens that were generated, or are in the prompt: counted per sample, and applied to a whole batch at once.

A row of its own would take eight operations, each a launch on a GPU, for every sequence in every step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams


class TokenCounts:
    """The tokens that one sample's penalties apply to, and how often each was generated.

    Args:
        token_ids: tokens that they apply to without being generated.
    """

    def __init__(self, token_ids: Sequence[int] | NDArray[np.int32]) -> None:
        always = np.unique(np.asarray(token_ids, dtype=np.int64))
        self._positions = dict(zip(always.tolist(), range(len(always)), strict=True))
        self._ids = np.concatenate([always, np.zeros(64, dtype=np.int64)])
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_always = len(always)
        self._num_counted = 0

    def update(self, output_token_ids: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """Count the tokens that are new since the last call; returns ids and counts, each id once."""
        for token_id in output_token_ids[self._num_counted :]:
            position = self._positions.setdefault(token_id, len(self._positions))
            if position == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[position] = token_id
            self._counts[position] += 1
        self._num_counted = len(output_token_ids)
        size = len(self._positions)
        return self._ids[:size], self._counts[:size]

    def rewind(self, output_token_ids: Sequence[int], num_tokens: int) -> None:
        """Forget the drafts that were counted last: ``output_token_ids`` beyond the first ``num_tokens``."""
        for token_id in output_token_ids[num_tokens : self._num_counted][::-1]:
            position = self._positions[token_id]
            self._counts[position] -= 1
            if not self._counts[position] and position >= self._num_always:
                self._positions.popitem()  # the one that was added last: itself
        self._num_counted = min(self._num_counted, num_tokens)


class Penalties:
    """The penalties of some rows of a batch."""

    def __init__(self) -> None:
        # Of each row: its index, the tokens and how often each was generated, and how strong the penalties are.
        self._rows: list[tuple[int, NDArray[np.int64], NDArray[np.float32], tuple[float, float, float]]] = []

    def add(self, row: int, params: SamplingParams, ids: NDArray[np.int64], counts: NDArray[np.float32]) -> None:
        """Penalize a row, which has none yet, for tokens that were generated so often. The counts may change afterwards."""
        strengths = params.repetition_penalty, params.presence_penalty, params.frequency_penalty
        self._rows.append((row, ids, counts.copy(), strengths))

    def apply(self, logits: torch.Tensor) -> None:
        """Change the rows of ``logits``, contiguous float32 ``[rows, vocabulary]``, in place.

        A prompt's tokens that have no logit, where the output head is narrower than the vocabulary, are left out.
        """
        if not any(len(ids) for _, ids, _, _ in self._rows):
            return
        rows, ids, counts, strengths = zip(*self._rows, strict=True)
        lengths, width = list(map(len, ids)), logits.shape[1]
        all_ids = np.concatenate(ids)
        has_logit = all_ids < width  # otherwise the index would be one in the next row
        seen = to_device(
            torch.from_numpy((np.repeat(np.array(rows) * width, lengths) + all_ids)[has_logit]), logits.device
        )
        numbers = np.repeat(np.array(strengths, dtype=np.float32).T, lengths, axis=1)
        numbers = np.concatenate([numbers, np.concatenate(counts)[None]])[:, has_logit]
        repetition, presence, frequency, times = to_device(torch.from_numpy(numbers), logits.device)
        flat = logits.view(-1)
        values = flat[seen]
        values = torch.where(values > 0, values / repetition, values * repetition)
        flat[seen] = values - presence * (times > 0) - frequency * times
