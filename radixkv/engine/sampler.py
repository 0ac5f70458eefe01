"""From a batch's logits to one token a row.

Random numbers belong to the request, never to the batch. For token number i of sample s, every token id of the
vocabulary gets an exponential variate that is a pure function of (the request's seed, s, i, the id), and the id with the
largest ratio of probability to variate is taken: an exponential race, equivalent to Gumbel-max sampling. So neither batch
mates, nor what was cached, nor preemption changes a draw; there is no generator state to lose.

How far that reaches: another batch shape can change the order of additions in a matrix product, and with it a logit by
about 1e-6 relative. A draw then differs only where the two first of the race are that close. (Inverting the cumulated
distribution would be cheaper, but every border between two tokens moves with the sum of all changes before it: of 1,400
tokens sampled at temperature 1 alone and in a batch of 32, three differed.)
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

from radixkv.engine.structured_output import GrammarState, bar_tokens
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
        forbidden_token_ids: cannot be chosen before ``min_tokens`` are there, unless the grammar leaves nothing else.
        grammar: what the answer must keep to.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    output_token_ids: list[int] = field(default_factory=list)
    forbidden_token_ids: frozenset[int] = frozenset()
    grammar: GrammarState | None = None

    def exponentials(self, token_ids: NDArray[np.uint64]) -> torch.Tensor:
        """The next token's variates for these ids, float32: mean 1, the same for the same id whatever the others are."""
        key = struct.pack("<QQQ", self.seed & (2**64 - 1), self.sample_index, len(self.output_token_ids))
        # SplitMix64 (Steele, Lea, Flood 2014) counted by token id, from a start that the key decides.
        x = np.uint64(xxhash.xxh3_64_intdigest(key)) + (token_ids + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        uniform = ((x ^ (x >> np.uint64(31))) >> np.uint64(11)).astype(np.float64) * 2**-53
        # Rounded only now: small variates decide races, and keep their relative precision so. Never 0, never infinite.
        rounded = uniform.astype(np.float32).clip(2**-60, 1 - 2**-24)
        return torch.from_numpy(-np.log1p(-rounded))

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

        Logits are barred by grammars, biased, barred and penalized, divided by the temperature, then cut by min_p, top_k and
        top_p, in that order. Reported log-probabilities are the model's own, from before all that.
        """
        raw = logits
        changed = [i for i, row in enumerate(rows) if row.changes_logits]
        grammars = {i: row.grammar for i, row in enumerate(rows) if row.grammar is not None}
        if changed or grammars:
            logits = logits.clone()
            if grammars:
                bar_tokens(logits, grammars)
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
        forbidden = list(row.forbidden_token_ids)
        saved = logits[forbidden]
        logits[forbidden] = float("-inf")
        if row.grammar is not None and bool(torch.isneginf(logits).all()):
            logits[forbidden] = saved
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
        return _race(torch.softmax(scaled, -1), np.arange(vocab_size, dtype=np.uint64), row)
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
    place = _race(kept, token_ids.numpy().astype(np.uint64), row)
    return int(token_ids[place])


def _mass(scaled: torch.Tensor, log_total: torch.Tensor, min_p: float, top_k: int) -> float:
    """Probability that min_p and top_k leave, where more tokens are left than were looked at."""
    if min_p == 0.0 and top_k == scaled.shape[0]:
        return 1.0
    probs = torch.exp(scaled - log_total)
    if top_k < scaled.shape[0]:
        probs = torch.topk(probs, top_k).values
    return float(probs[probs >= min_p * probs.max()].sum())


def _race(probs: torch.Tensor, token_ids: NDArray[np.uint64], row: SamplingRow) -> int:
    """The place of the token that is drawn, each with a chance in proportion to its probability."""
    return int((probs / row.exponentials(token_ids)).argmax())


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
