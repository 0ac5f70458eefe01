"""Log-probabilities of one token and of the likeliest ones of each row of logits, in one call of the library."""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch

from radixkv_cpu.checks import check_tensor
from radixkv_cpu.fields import pointers, sizes
from radixkv_cpu.library import require_library


class Logprobs(NamedTuple):
    """Log-probabilities of rows of logits.

    Attributes:
        totals: float32 ``[rows]``: the log-sum-exp; a log-probability is the logit less this.
        ranks: int64 ``[rows]``: the rank of each row's token, from 1; equally likely tokens share the lowest.
        top_ids: int64 ``[rows, count]``: the likeliest tokens, the likeliest first; of equally likely ones, the lowest ids.
        top_logits: float32 ``[rows, count]``: their logits.
    """

    totals: torch.Tensor
    ranks: torch.Tensor
    top_ids: torch.Tensor
    top_logits: torch.Tensor


class _Logprobs(ctypes.Structure):
    """`Logprobs` of ``src/calls.h``."""

    _fields_ = (
        *pointers("logits", "token_ids", *Logprobs._fields),
        *sizes("rows", "vocab_size", "count"),
    )


def token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    """Describe one token of each row and the ``count`` likeliest.

    Args:
        logits: float32 ``[rows, vocabulary]``. If a row has a NaN or plus infinity, or nothing above minus infinity, its
            total is not finite, and the order of its tokens means nothing.
        token_ids: int64 ``[rows]``.

    Raises:
        ValueError: a tensor is not as above, a token is not of the vocabulary, or it has fewer than ``count``.
    """
    check_tensor("logits", logits, [None, None], [torch.float32])
    rows, vocab_size = logits.shape
    check_tensor("token_ids", token_ids, [rows], [torch.int64])
    if not 0 <= count <= vocab_size:
        raise ValueError(f"count: expected 0 to {vocab_size}, as many as the vocabulary has tokens, got {count}")
    if rows and not 0 <= int(token_ids.min()) <= int(token_ids.max()) < vocab_size:
        raise ValueError(f"token_ids: expected 0 to {vocab_size - 1}, got {token_ids.tolist()}")
    found = Logprobs(
        torch.empty(rows, dtype=torch.float32), torch.empty(rows, dtype=torch.int64),
        torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count, dtype=torch.float32),
    )  # fmt: skip
    call = _Logprobs(
        logits.data_ptr(), token_ids.data_ptr(), *(column.data_ptr() for column in found), rows, vocab_size, count
    )
    require_library().logprobs(ctypes.addressof(call), False)
    return found
