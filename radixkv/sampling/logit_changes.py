"""How a request's parameters change its logits: biases, tokens that may not be sampled, and penalties.

Tensors that stay the same are made once per request; to what grows with the answer, each step adds only the newest tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams


class TokenCounts:
    """The tokens that penalties apply to, and how often each was generated.

    Args:
        token_ids: tokens that they apply to without being generated.
    """

    def __init__(self, token_ids: Iterable[int]) -> None:
        unique = list(dict.fromkeys(int(token_id) for token_id in token_ids))
        self._positions = {token_id: position for position, token_id in enumerate(unique)}
        self._ids = np.array([*unique, *[0] * 64], dtype=np.int64)
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._num_always = len(unique)
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
        """Forget the tokens that were counted beyond the first ``num_tokens``: drafts.

        Args:
            output_token_ids: what was counted last.
            num_tokens: how many of them stay.
        """
        for token_id in output_token_ids[num_tokens : self._num_counted][::-1]:
            position = self._positions[token_id]
            self._counts[position] -= 1
            if not self._counts[position] and position >= self._num_always:
                self._positions.popitem()  # the one that was added last: itself
        self._num_counted = min(self._num_counted, num_tokens)


class LogitChanges:
    """The changes for one request, whose samples share this.

    Args:
        params: the request's parameters.
        forbidden_token_ids: masked until ``min_tokens`` are generated, unless nothing else is allowed.
        bad_words: token ids of each of the ``bad_words``; masked unless nothing else is allowed.
    """

    def __init__(
        self, params: SamplingParams, forbidden_token_ids: Iterable[int], bad_words: Iterable[Sequence[int]]
    ) -> None:
        self._params = params
        self._forbidden = list(forbidden_token_ids)
        self._always_bad: list[int] = []
        # A word's tokens before the last, and its last token, by its last but one token, so that a step looks at few words.
        self._bad_ends: dict[int, list[tuple[list[int], int]]] = {}
        for *start, last in bad_words:
            if start:
                self._bad_ends.setdefault(start[-1], []).append((start, last))
            else:
                self._always_bad.append(last)
        self.penalizes = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
        masks = bool(self._always_bad or self._bad_ends or params.allowed_token_ids)
        self.always = self.penalizes or masks or bool(params.biases)
        self.num_masked_steps = params.min_tokens if self._forbidden else 0
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._disallowed: torch.Tensor | None = None

    def new_counts(self, prompt_token_ids: Iterable[int]) -> TokenCounts:
        """Counts for one sample's penalties."""
        return TokenCounts(prompt_token_ids if self._params.repetition_penalty != 1.0 else ())

    def apply(self, logits: torch.Tensor, output_token_ids: Sequence[int], counts: TokenCounts | None) -> None:
        """Change one row, in place.

        Args:
            logits: float32 ``[vocabulary]``.
            output_token_ids: what the sample has generated.
            counts: the sample's, from `new_counts`.
        """
        self._apply_fixed(logits)
        self._mask(logits, output_token_ids)
        if counts is not None:
            self._penalize(logits, *counts.update(output_token_ids))

    def _apply_fixed(self, logits: torch.Tensor) -> None:
        params = self._params
        if params.allowed_token_ids is not None:
            if self._disallowed is None:
                disallowed = torch.ones(logits.shape[0], dtype=torch.bool)
                disallowed[list(params.allowed_token_ids)] = False
                self._disallowed = to_device(disallowed, logits.device)
            logits.masked_fill_(self._disallowed, float("-inf"))
        if params.biases:
            if self._bias is None:
                ids = torch.tensor(list(params.biases))
                values = torch.tensor(list(params.biases.values()), dtype=torch.float32)
                self._bias = to_device(ids, logits.device), to_device(values, logits.device)
            ids, values = self._bias
            logits[ids] += values

    def _mask(self, logits: torch.Tensor, output_token_ids: Sequence[int]) -> None:
        bad = list(self._always_bad)
        if output_token_ids and self._bad_ends:
            for start, last in self._bad_ends.get(output_token_ids[-1], ()):
                if start == list(output_token_ids[-len(start) :]):
                    bad.append(last)
        _mask_unless_all(logits, bad)
        if len(output_token_ids) < self.num_masked_steps:
            _mask_unless_all(logits, self._forbidden)

    def _penalize(self, logits: torch.Tensor, ids: NDArray[np.int64], counts: NDArray[np.float32]) -> None:
        if not len(ids):
            return
        params = self._params
        seen = to_device(torch.from_numpy(ids), logits.device)
        times = to_device(torch.from_numpy(counts), logits.device)
        values = logits[seen]
        penalty = params.repetition_penalty
        if penalty != 1.0:
            values = torch.where(values > 0, values / penalty, values * penalty)
        logits[seen] = values - params.presence_penalty * (times > 0).float() - params.frequency_penalty * times


def _mask_unless_all(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Mask these tokens of one row, unless nothing else is allowed."""
    if not token_ids:
        return
    # Neither a list as index nor a branch on the result, which would wait for the device.
    ids = to_device(torch.tensor(token_ids), logits.device)
    unmasked = logits[ids]
    logits.index_fill_(0, ids, float("-inf"))
    logits[ids] = torch.where(torch.isneginf(logits).all(), unmasked, float("-inf"))
