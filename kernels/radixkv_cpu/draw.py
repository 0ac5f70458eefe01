"""One token per row of logits, in one call of the library."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library


class Truncation(NamedTuple):
    """Which tokens of each row may be drawn. The three apply in this order; of equally likely tokens, the lowest ids stay.

    Attributes:
        min_p: float32 ``[rows]``: tokens with at least this fraction of the likeliest one's probability.
        top_k: int64 ``[rows]``, at least 1: so many of the likeliest.
        top_p: float32 ``[rows]``, above 0: each token as long as the likelier ones together have less than this fraction of
            the probability that is left.
    """

    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


class _Draw(ctypes.Structure):
    """`Draw` of ``src/calls.h``."""

    _fields_ = (
        *pointers("logits", "temperatures", "states", "top_k", "top_p", "min_p", "token_ids"),
        *sizes("rows", "vocab_size"),
    )


def draw_tokens(
    logits: torch.Tensor, temperatures: torch.Tensor, states: torch.Tensor, truncation: Truncation | None = None
) -> torch.Tensor:
    """Draw by an exponential race: the largest ratio of probability to an exponential variate wins.

    A token's variate is SplitMix64's (Steele, Lea, Flood 2014) after as many steps from the row's state as the token's id.
    Without truncation, blocks of 256 neighbouring ids race first, block b with the id -2 - b; then the winner's tokens.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        temperatures: float32 ``[rows]``, above 0, by which logits are divided. Neither these numbers nor the truncation's are
            checked.
        states: int64 ``[rows]``.
        truncation: None: every token may be drawn.

    Returns:
        Token ids, int64 ``[rows]``; 0 for a row that has a NaN or plus infinity, or nothing above minus infinity.

    Raises:
        ValueError: a tensor is not as above, or there is no token.
    """
    check_tensor("logits", logits, [None, None], [torch.float32])
    rows, vocab_size = logits.shape
    if not vocab_size:
        raise ValueError(f"logits: expected at least one token, got shape {list(logits.shape)}")
    check_tensor("temperatures", temperatures, [rows], [torch.float32])
    check_tensor("states", states, [rows], [torch.int64])
    if truncation is not None:
        for name, column in zip(truncation._fields, truncation, strict=True):
            check_tensor(name, column, [rows], [torch.int64 if name == "top_k" else torch.float32])
    token_ids = torch.empty(rows, dtype=torch.int64)
    min_p, top_k, top_p = (None, None, None) if truncation is None else (column.data_ptr() for column in truncation)
    call = _Draw(
        logits.data_ptr(), temperatures.data_ptr(), states.data_ptr(), top_k, top_p, min_p, token_ids.data_ptr(),
        rows, vocab_size,
    )  # fmt: skip
    require_library().draw(ctypes.addressof(call), truncation is not None)
    return token_ids
