"""Log-probabilities: of a sampled token, of a prompt's, and of the likeliest tokens beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from radixkv_cpu import Logprobs, library, token_logprobs

# (token id, log-probability, rank from 1)
TokenLogprob = tuple[int, float, int]


class SampledToken(NamedTuple):
    """A sampled token; if ``logprobs`` were asked for, ``top_logprobs`` has the likeliest tokens and itself."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


def with_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
    """Each row's token with its log-probability, and those of the row's ``counts`` likeliest, or of all that have a logit."""
    if not token_ids:
        return []
    counts = [min(count, logits.shape[1]) for count in counts]  # an output head may be narrower than the vocabulary
    chosen = torch.tensor(token_ids, device=logits.device)
    totals, ranks, top_ids, top_logits = _describe(logits, chosen, max(counts))
    own = logits.gather(1, chosen.unsqueeze(1)).squeeze(1) - totals
    columns = own, ranks, top_ids, top_logits - totals.unsqueeze(1)
    tokens = []
    for token_id, count, logprob, rank, likeliest, logprobs in zip(
        token_ids, counts, *(column.tolist() for column in columns), strict=True
    ):
        entries = list(zip(likeliest[:count], logprobs[:count], range(1, count + 1), strict=True))
        if token_id not in likeliest[:count]:
            entries.append((token_id, logprob, rank))
        tokens.append(SampledToken(token_id, logprob, tuple(entries)))
    return tokens


def _describe(logits: torch.Tensor, token_ids: torch.Tensor, count: int) -> Logprobs:
    if logits.device.type == "cpu" and library() is not None:
        # torch's passes take 3.4 ms for 16 rows of 49,152 logits on two cores, one call of native code 0.3.
        return token_logprobs(logits.contiguous(), token_ids, count)
    own = logits.gather(1, token_ids.unsqueeze(1))
    values, ids = torch.topk(logits, count)
    return Logprobs(torch.logsumexp(logits, -1), (logits > own).sum(-1) + 1, ids, values)
