"""Masks logits by grammars: the tokens that a grammar does not allow next are never sampled."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling.grammar.state import GrammarState

# Handing masks to other threads takes as long as computing a few common ones.
_MAX_SERIAL_SECONDS = 0.001


def apply_grammar_bitmask(
    logits: torch.Tensor, states: Mapping[int, GrammarState], drafts: Mapping[int, Sequence[int]] | None = None
) -> None:
    """Set the logits of tokens that the grammars do not allow to minus infinity, in place.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        states: by row; the other rows are unchanged.
        drafts: by row, tokens that may come next; the rows behind it are for what follows each of them.
    """
    vocab_size = logits.shape[1]
    following = [() if drafts is None else drafts[row] for row in states]
    rows = [row + i for row, draft in zip(states, following, strict=True) for i in range(1 + len(draft))]
    num_tokens = max(state.num_tokens for state in states.values())  # the same for all: one model's
    bitmask = np.full((len(rows), -(-num_tokens // 32)), -1, dtype=np.int32)
    _fill_bitmask(bitmask, list(states.values()), following)
    if logits.device.type == "cpu":
        mask = torch.from_numpy(np.unpackbits(bitmask.view(np.uint8), axis=1, count=vocab_size, bitorder="little") == 0)
    else:
        mask = disallowed_tokens(to_device(torch.from_numpy(bitmask.view(np.uint8)), logits.device), vocab_size)
    if rows == list(range(len(logits))):  # no copies of all rows
        logits.masked_fill_(mask, float("-inf"))
    else:
        indices = to_device(torch.tensor(rows), logits.device)
        logits[indices] = logits[indices].masked_fill(mask, float("-inf"))


def disallowed_tokens(bitmask: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Which tokens some masks do not allow, bool ``[rows, vocab_size]``, unpacked where the masks are.

    Args:
        bitmask: uint8 ``[rows, bytes]``, a bit per token that is allowed, lowest bit first.
        vocab_size: tokens beyond the masks' bits are not allowed.
    """
    bits = torch.arange(8, dtype=torch.uint8, device=bitmask.device)
    disallowed = ((bitmask[:, :, None] >> bits) & 1).eq(0).flatten(1)[:, :vocab_size]
    return torch.nn.functional.pad(disallowed, (0, vocab_size - disallowed.shape[1]), value=True)


def _fill_bitmask(bitmask: NDArray[np.int32], states: Sequence[GrammarState], drafts: Sequence[Sequence[int]]) -> None:
    """Fill one row for each state and each of its drafts; once that has taken long, the rest of the states in parallel."""
    total = 0.0
    counts = [1 + len(draft) for draft in drafts]
    first_rows = [stop - count for stop, count in zip(itertools.accumulate(counts), counts, strict=True)]
    for index, state in enumerate(states):
        if total > _MAX_SERIAL_SECONDS:
            rest = range(index, len(states))
            began = state.resources.wall_time()
            times = list(
                state.resources.threads.map(lambda i: states[i].fill_bitmask(bitmask, first_rows[i], drafts[i]), rest)
            )
            # In parallel, they make everything else wait for less than the processor time that they take.
            stall = (state.resources.wall_time() - began) / max(sum(times), 1e-9)
            for later, seconds in zip(rest, times, strict=True):
                states[later].budget.spend(seconds, seconds * stall)
            return
        seconds = state.fill_bitmask(bitmask, first_rows[index], drafts[index])
        state.budget.spend(seconds)
        total += seconds
