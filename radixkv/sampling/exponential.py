"""Exponential sampling: one token per row of logits, drawn on the logits' device with random numbers that belong to requests.

Each candidate gets an exponential variate, and the largest ratio of probability to variate is drawn (an "exponential race",
equivalent to Gumbel-max sampling). The variates are a pure function of the request's seed, the sample, the token's index in
the answer and the candidate's token id (`radixkv.sampling.variates`).

Where top_k, top_p or min_p leave few candidates, these are drawn from directly. Otherwise a block of 256 neighbouring token
ids is drawn first, by the total probability of each block, and then a token id within it: a vocabulary of 49,152 takes 448
variates and little more time than its softmax. On a GPU, `radixkv_kernels.draw_tokens` does so in one kernel; on
a CPU, all draws are those of `radixkv.sampling.host_draw`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radixkv.memory.upload import to_device
from radixkv.sampling import host_draw
from radixkv.sampling.variates import SamplingRow, exponential_variates, rng_states
from radixkv.sampling_params import SamplingParams

# How many of the likeliest tokens a GPU considers first for top_p: sorting a whole vocabulary costs far more.
FIRST_NUM_CANDIDATES = 1024


def draw(
    logits: torch.Tensor, rows: Sequence[SamplingRow], num_candidates: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row of float32 ``logits`` ``[rows, vocabulary]``, without synchronizing with the device.

    Logits are divided by the temperature, then truncated by min_p, top_k and top_p, in that order.

    Args:
        num_candidates: how many of a row's likeliest tokens to truncate; None: on a CPU all, on a GPU enough for most rows.

    Returns:
        Token ids, int64 ``[rows]``; and which of them are final, bool ``[rows]``: a row that is not must be drawn again with
        more than its ``num_candidates`` likeliest tokens.
    """
    device = logits.device
    truncated = [i for i, row in enumerate(rows) if row.truncates]
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    final = torch.ones(len(rows), dtype=torch.bool, device=device)
    if not rows:
        return token_ids, final
    if not truncated:
        return _draw_from_vocabulary(logits, rows), final
    if len(truncated) == len(rows):
        return _draw_truncated(logits, rows, num_candidates)
    whole = [i for i, row in enumerate(rows) if not row.truncates]
    indices = to_device(torch.tensor(whole), device)
    token_ids[indices] = _draw_from_vocabulary(logits[indices], [rows[i] for i in whole])
    indices = to_device(torch.tensor(truncated), device)
    token_ids[indices], final[indices] = _draw_truncated(logits[indices], [rows[i] for i in truncated], num_candidates)
    return token_ids, final


def draw_in_every_way(logits: torch.Tensor) -> None:
    """Draw one token per row of ``logits`` with and without truncation: compiles every kernel, and needs the most memory.

    Truncation takes several times the memory of the logits, drawing from the whole vocabulary none.
    """
    for params in (SamplingParams(), SamplingParams(top_p=0.9)):
        draw(logits, [SamplingRow(params, seed=0, sample_index=0, token_index=0)] * len(logits))


def _temperatures(rows: Sequence[SamplingRow], device: torch.device) -> torch.Tensor:
    return to_device(torch.tensor([row.params.temperature for row in rows], dtype=torch.float32), device)


def _draw_from_vocabulary(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = logits.device
    if device.type == "cpu":
        return host_draw.draw_from_vocabulary(logits, rows)
    # Imported only here: without a GPU, Triton need not be installed.
    from radixkv_kernels import draw_tokens

    with torch.cuda.device(device):
        return draw_tokens(logits, _temperatures(rows, device), rng_states(rows, device))


def _draw_truncated(
    logits: torch.Tensor, rows: Sequence[SamplingRow], num_candidates: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    if num_candidates is None and logits.device.type == "cpu":
        return host_draw.draw_truncated(logits, rows), torch.ones(len(rows), dtype=torch.bool)
    return _draw_from_likeliest(logits, rows, num_candidates or FIRST_NUM_CANDIDATES)


def _draw_from_likeliest(
    logits: torch.Tensor, rows: Sequence[SamplingRow], num_candidates: int
) -> tuple[torch.Tensor, torch.Tensor]:
    device, vocab_size = logits.device, logits.shape[1]
    limits = [row.params.top_k if 0 < row.params.top_k < vocab_size else vocab_size for row in rows]
    numbers = [[limit, row.params.top_p, row.params.min_p] for limit, row in zip(limits, rows, strict=True)]
    top_k, top_p, min_p = to_device(torch.tensor(numbers, dtype=torch.float32), device).unsqueeze(2).unbind(1)
    count = min(num_candidates, vocab_size, max(limits))
    # Probabilities stay those of the whole vocabulary until truncation is complete.
    probs, ids = _likeliest(logits, _temperatures(rows, device), count)
    rank = torch.arange(count, device=device).unsqueeze(0)
    keep = (probs >= min_p * probs[:, :1]) & (rank < top_k)
    kept = probs * keep
    total = kept.sum(-1, keepdim=True)
    saw_all = (top_k <= count) | ~keep[:, -1:] | (count == vocab_size)
    # top_p counts within what min_p and top_k have left. Where they leave more than the candidates, that is everything if
    # they removed nothing, and unknown otherwise.
    untruncated = (min_p == 0.0) & (top_k == vocab_size)
    mass = top_p * torch.where(saw_all, total, 1.0)
    final = saw_all | (untruncated & (total >= mass))
    # A token stays while the likelier ones together are below the mass; so the first always does.
    kept = kept * ((kept.cumsum(-1) - kept) < mass)
    kept[:, 0] = probs[:, 0]
    drawn = (kept / exponential_variates(rng_states(rows, device).unsqueeze(1), ids)).argmax(-1, keepdim=True)
    return ids.gather(1, drawn).squeeze(1), final.squeeze(1)


def _likeliest(logits: torch.Tensor, temperatures: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The ``count`` largest probabilities of each row in descending order, and their token ids."""
    scaled = logits / temperatures.unsqueeze(1)
    values, ids = torch.topk(scaled, count)
    return torch.exp(values - torch.logsumexp(scaled, -1, keepdim=True)), ids
