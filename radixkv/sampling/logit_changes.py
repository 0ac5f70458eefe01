"""How a request's parameters change its logits: biases, and tokens that may not be sampled.

Tensors that stay the same are made once per request. Tokens that have no logit, where the output head is narrower than the
vocabulary, are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from radixkv.memory.upload import to_device
from radixkv.sampling_params import SamplingParams


class LogitChanges:
    """The changes for one request, whose samples share this.

    Args:
        forbidden_token_ids: masked until ``min_tokens`` are generated, unless nothing else is allowed but ``bad_words``.
        bad_words: token ids of each of the ``bad_words``; their last tokens are masked unless nothing else is allowed at all.
    """

    def __init__(
        self,
        params: SamplingParams,
        forbidden_token_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
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
        self._masks = bool(self._always_bad or self._bad_ends or params.allowed_token_ids)
        self._masks_or_biases = self._masks or bool(params.biases)
        self.always = self.penalizes or self._masks_or_biases
        self.num_masked_steps = params.min_tokens if self._forbidden else 0
        self._bias: tuple[torch.Tensor, torch.Tensor] | None = None
        self._disallowed: torch.Tensor | None = None
        self._forbidden_there: torch.Tensor | None = None

    def apply(self, logits: torch.Tensor, row: int, output_token_ids: Sequence[int], constrained: bool) -> None:
        """Change a row of ``logits``, float32 ``[rows, vocabulary]``, in place, but for penalties.

        Args:
            constrained: whether a grammar has masked some of the row.
        """
        if self._masks_or_biases or len(output_token_ids) < self.num_masked_steps:
            of_row = logits[row]
            self._apply_fixed(of_row)
            self._mask(of_row, output_token_ids, constrained)

    def _apply_fixed(self, logits: torch.Tensor) -> None:
        params = self._params
        if params.allowed_token_ids is not None:
            if self._disallowed is None:
                disallowed = torch.ones(logits.shape[0], dtype=torch.bool)
                disallowed[_with_logits(params.allowed_token_ids, logits)] = False
                self._disallowed = to_device(disallowed, logits.device)
            logits.masked_fill_(self._disallowed, float("-inf"))
        if params.biases:
            if self._bias is None:
                biased = _with_logits(params.biases, logits)
                ids = torch.tensor(biased, dtype=torch.int64)
                values = torch.tensor([params.biases[token_id] for token_id in biased], dtype=torch.float32)
                self._bias = to_device(ids, logits.device), to_device(values, logits.device)
            ids, values = self._bias
            logits.index_add_(0, ids, values)

    def _mask(self, logits: torch.Tensor, output_token_ids: Sequence[int], constrained: bool) -> None:
        bad = list(self._always_bad)
        if output_token_ids and self._bad_ends:
            for start, last in self._bad_ends.get(output_token_ids[-1], ()):
                if start == list(output_token_ids[-len(start) :]):
                    bad.append(last)
        if bad:
            _mask_unless_all(logits, bad)
        if len(output_token_ids) < self.num_masked_steps:
            if constrained or self._masks:
                _mask_unless_all(logits, self._forbidden)
            else:  # the usual case, in a third of the time
                if self._forbidden_there is None:
                    forbidden = torch.tensor(_with_logits(self._forbidden, logits), dtype=torch.int64)
                    self._forbidden_there = to_device(forbidden, logits.device)
                logits.index_fill_(0, self._forbidden_there, float("-inf"))


def _mask_unless_all(logits: torch.Tensor, token_ids: Sequence[int]) -> None:
    """Mask these tokens of one row, unless nothing else is allowed."""
    token_ids = _with_logits(token_ids, logits)
    if not token_ids:
        return
    # Neither a list as index nor a branch on the result, which would wait for the device.
    ids = to_device(torch.tensor(token_ids), logits.device)
    unmasked = logits[ids]
    logits.index_fill_(0, ids, float("-inf"))
    # The maximum takes a tenth of the time of comparing each logit.
    logits[ids] = torch.where(torch.isneginf(logits.amax()), unmasked, float("-inf"))


def _with_logits(token_ids: Iterable[int], logits: torch.Tensor) -> list[int]:
    num_logits = logits.shape[0]  # once: torch takes half a microsecond for it
    return [token_id for token_id in token_ids if token_id < num_logits]
