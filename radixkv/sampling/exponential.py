"""Exponential sampling: one token per row of logits, drawn on the logits' device with random numbers that belong to requests.

Each candidate gets an exponential variate, and the largest ratio of probability to variate is drawn (an "exponential race",
equivalent to Gumbel-max sampling). The variates are a pure function of the request's seed, the sample, the token's index in
the answer and the candidate's token id (`radixkv.sampling.variates`).

Where top_k, top_p or min_p leave few candidates, these are drawn from directly. Otherwise a block of 256 neighbouring token
ids is drawn first, by the total probability of each block, and then a token id within it: a vocabulary of 49,152 takes 448
variates and little more time than its softmax. On a GPU, this is `radixkv_kernels.draw_truncated` and
`radixkv_kernels.draw_tokens`; on a CPU, `radixkv.sampling.host_draw`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from radixkv.memory.upload import to_device, upload
from radixkv.sampling import host_draw
from radixkv.sampling.variates import SamplingRow, rng_states


def draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """One token per row of float32 ``logits`` ``[rows, vocabulary]``, int64 ``[rows]``; the device is not waited for.

    Logits are divided by the temperature, then truncated by min_p, top_k and top_p, in that order.
    """
    device = logits.device
    truncated = [i for i, row in enumerate(rows) if row.truncates]
    if not rows:
        return torch.empty(0, dtype=torch.int64, device=device)
    if not truncated:
        return _draw_from_vocabulary(logits, rows)
    if len(truncated) == len(rows):
        return _draw_truncated(logits, rows)
    token_ids = torch.empty(len(rows), dtype=torch.int64, device=device)
    whole = [i for i, row in enumerate(rows) if not row.truncates]
    for indices, draw_part in ((whole, _draw_from_vocabulary), (truncated, _draw_truncated)):
        # Indexing by the list itself would synchronize with the device.
        there = to_device(torch.tensor(indices), device)
        token_ids[there] = draw_part(logits[there], [rows[i] for i in indices])
    return token_ids


def _draw_from_vocabulary(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device = logits.device
    if device.type == "cpu":
        return host_draw.draw_from_vocabulary(logits, rows)
    # Imported only here: without a GPU, Triton need not be installed.
    from radixkv_kernels import draw_tokens

    temperatures = torch.tensor([row.params.temperature for row in rows], dtype=torch.float32)
    with torch.cuda.device(device):
        return draw_tokens(logits, to_device(temperatures, device), rng_states(rows, device))


def _draw_truncated(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    device, vocab_size = logits.device, logits.shape[1]
    if device.type == "cpu":
        return host_draw.draw_truncated(logits, rows)
    from radixkv_kernels import draw_truncated

    with torch.cuda.device(device):
        return draw_truncated(logits, rng_states=rng_states(rows, device), **_parameters(rows, vocab_size, device))


def _parameters(rows: Sequence[SamplingRow], vocab_size: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Columns of `draw_truncated`, under its names for them."""
    temperatures, top_k, top_p, min_p = host_draw.DrawParameters.of(rows, vocab_size)
    # All in one copy, each aligned to 16 bytes.
    floats = (column.view(np.int32) for column in (temperatures, min_p, top_p))
    *columns, limits = upload([*floats, top_k.astype(np.int32)], device)
    temperatures_there, min_p_there, top_p_there = (column.view(torch.float32) for column in columns)
    return {"temperatures": temperatures_there, "min_p": min_p_there, "top_p": top_p_there, "top_k": limits}
