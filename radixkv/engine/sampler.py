"""From a batch's logits to one token a row.

Random numbers belong to the request, never to the batch. Token number i of sample s of a request draws one uniform
number that is a pure function of (the request's seed, s, i), and takes the token at which the cumulated probabilities
pass it. So neither batch mates, nor what was cached, nor preemption changes a draw; there is no generator state to lose.

How far that reaches: another batch shape can change the order of additions in a matrix product, and with it a logit by
some 1e-6 relative. A draw then differs only when its number falls within that distance of a border between two tokens,
about once in 1e5 tokens; a greedy choice only when two logits are that close.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from radixkv.sampling_params import SamplingParams

# (token id, log-probability, rank from 1)
TokenLogprob = tuple[int, float, int]

# How many of the likeliest tokens are looked at first for top_p: sorting a whole vocabulary costs far more.
_FIRST_LOOK = 1024


@dataclass(eq=False)
class SamplingRow:
    """What the sampler needs of one sequence; the engine owns it and appends to ``output_token_ids``.

    Attributes:
        seed: the request's.
        sample_index: which of the request's answers.
        forbidden_token_ids: cannot be chosen before ``min_tokens`` are there.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    output_token_ids: list[int] = field(default_factory=list)
    forbidden_token_ids: frozenset[int] = frozenset()

    def uniform(self) -> float:
        """The next token's random number, in [0, 1)."""
        key = struct.pack("<QQQ", self.seed & (2**64 - 1), self.sample_index, len(self.output_token_ids))
        return (xxhash.xxh3_64_intdigest(key) >> 11) / 2**53

    @property
    def changes_logits(self) -> bool:
        params = self.params
        return bool(
            params.biases
            or params.presence_penalty
            or params.frequency_penalty
            or params.repetition_penalty != 1.0
            or (self.forbidden_token_ids and len(self.output_token_ids) < params.min_tokens)
        )


@dataclass(frozen=True, slots=True)
class SampledToken:
    """A chosen token; with ``logprobs`` asked for, the likeliest tokens and itself as ``top_logprobs``."""

    token_id: int
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


class Sampler:
    """Chooses tokens; keeps nothing between calls."""

    def sample(self, logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[SampledToken]:
        """One token for each row of ``logits``, float32 ``[rows, vocabulary]``.

        Logits are biased, barred and penalized, divided by the temperature, then cut by min_p, top_k and top_p, in that
        order. Reported log-probabilities are the model's own, from before all that.
        """
        raw = logits
        changed = [i for i, row in enumerate(rows) if row.changes_logits]
        if changed:
            logits = logits.clone()
            for i in changed:
                _change_logits(logits[i], rows[i])
        token_ids = [0] * len(rows)
        greedy = [i for i, row in enumerate(rows) if row.params.greedy]
        if greedy:
            chosen = (logits if len(greedy) == len(rows) else logits[greedy]).argmax(-1).tolist()
            for i, token_id in zip(greedy, chosen, strict=True):
                token_ids[i] = token_id
        for i, row in enumerate(rows):
            if not row.params.greedy:
                token_ids[i] = _draw(logits[i], row)
        return [
            SampledToken(token_id)
            if row.params.logprobs is None
            else _with_logprobs(raw[i], token_id, row.params.logprobs)
            for i, (token_id, row) in enumerate(zip(token_ids, rows, strict=True))
        ]

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], count: int) -> list[SampledToken]:
        """What ``logits`` (``[tokens, vocabulary]``) say of the tokens that follow, and of the ``count`` likeliest."""
        return [_with_logprobs(row, target, count) for row, target in zip(logits, targets, strict=True)]


def _change_logits(logits: torch.Tensor, row: SamplingRow) -> None:
    """Apply bias, min_tokens and penalties to one row, in place; only the tokens concerned are touched."""
    params = row.params
    if params.biases:
        logits[list(params.biases)] += torch.tensor(list(params.biases.values()))
    if row.forbidden_token_ids and len(row.output_token_ids) < params.min_tokens:
        logits[list(row.forbidden_token_ids)] = float("-inf")
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*map(int, row.prompt_token_ids), *row.output_token_ids}))
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        counts = Counter(row.output_token_ids)
        times = torch.tensor(list(counts.values()), dtype=torch.float32)
        logits[list(counts)] -= params.presence_penalty + params.frequency_penalty * times


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    params = row.params
    scaled = logits / params.temperature
    vocab_size = scaled.shape[0]
    top_k = params.top_k if 0 < params.top_k < vocab_size else vocab_size
    if top_k == vocab_size and params.top_p == 1.0 and params.min_p == 0.0:
        return _pick(torch.softmax(scaled, -1), row.uniform())
    # Likeliest first, as many as the filters can need; probabilities stay those of the whole vocabulary until all are cut.
    log_total = torch.logsumexp(scaled, -1)
    looked_at = min(top_k, _FIRST_LOOK, vocab_size)
    while True:
        values, token_ids = torch.topk(scaled, looked_at)
        probs = torch.exp(values - log_total)
        keep = probs >= params.min_p * probs[0]
        kept = probs * keep
        saw_all = looked_at == top_k or not bool(keep[-1])
        # top_p counts within what min_p and top_k have left.
        mass = params.top_p * (float(kept.sum()) if saw_all else _mass(scaled, log_total, params.min_p, top_k))
        if saw_all or bool(kept.sum() >= mass):
            break
        looked_at = min(top_k, 8 * looked_at)
    # A token stays while the likelier ones together are below the mass; so the first always does.
    kept = kept * ((kept.cumsum(-1) - kept) < mass)
    kept[0] = probs[0]
    # Token order, not order of likelihood: near-equal tokens that swap places must not change the draw.
    order = token_ids.argsort()
    kept = kept[order]
    return int(token_ids[order[_pick(kept / kept.sum(), row.uniform())]])


def _mass(scaled: torch.Tensor, log_total: torch.Tensor, min_p: float, top_k: int) -> float:
    """Probability that min_p and top_k leave, where more tokens are left than were looked at."""
    if min_p == 0.0 and top_k == scaled.shape[0]:
        return 1.0
    probs = torch.exp(scaled - log_total)
    if top_k < scaled.shape[0]:
        probs = torch.topk(probs, top_k).values
    return float(probs[probs >= min_p * probs.max()].sum())


def _pick(probs: torch.Tensor, uniform: float) -> int:
    """The first index at which the cumulated probabilities exceed ``uniform`` (inverse transform sampling)."""
    cumulated = probs.cumsum(-1, dtype=torch.float64)
    threshold = uniform * float(cumulated[-1])
    index = int(torch.searchsorted(cumulated, threshold, right=True))
    return min(index, int(probs.nonzero()[-1]))


def _with_logprobs(logits: torch.Tensor, token_id: int, count: int) -> SampledToken:
    log_total = float(torch.logsumexp(logits, -1))
    own = float(logits[token_id])
    values, ids = torch.topk(logits, count)
    entries = [
        (int(i), float(v) - log_total, rank) for rank, (i, v) in enumerate(zip(ids, values, strict=True), start=1)
    ]
    if token_id not in ids.tolist():
        entries.append((token_id, own - log_total, int((logits > own).sum()) + 1))
    return SampledToken(token_id, own - log_total, tuple(entries))
