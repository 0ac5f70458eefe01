"""From a batch's logits to one token a row.

Random numbers belong to the request, never to the batch: every draw is a race (`radixkv.sampling.exponential`)
whose variates are a pure function of the request's seed, the sample, the number of the token and the token id. So neither
batch mates, nor what was cached, nor preemption changes a draw; there is no generator state to lose.

How far that reaches: another batch shape can change the order of additions in a matrix product, and with it a logit by
about 1e-6 relative. A draw then differs only where the two first of the race are that close. (Inverting the cumulated
distribution would be cheaper, but every border between two tokens moves with the sum of all changes before it: of 1,400
tokens sampled at temperature 1 alone and in a batch of 32, three differed.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling.exponential import FIRST_LOOK, Racer, draw
from radixkv.sampling.structured_output import GrammarState, apply_grammar_bitmask
from radixkv.sampling_params import SamplingParams

# (token id, log-probability, rank from 1)
TokenLogprob = tuple[int, float, int]


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

    def racer(self, num_unknown: int = 0) -> Racer:
        """What the draw of the next token depends on, or of the one ``num_unknown`` later."""
        return Racer(self.params, self.seed, self.sample_index, len(self.output_token_ids) + num_unknown)

    @property
    def needs_host(self) -> bool:
        """Whether the next choice takes more than logits and random numbers: tokens that came before, or an account."""
        return self.changes_logits or self.grammar is not None or self.params.logprobs is not None

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
                apply_grammar_bitmask(logits, grammars)
            for i in changed:
                _change_logits(logits[i], rows[i])
        token_ids, _ = self.choose(logits, rows, [0] * len(rows)).fetch()
        described: dict[int, SampledToken] = {}
        with_logprobs = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        if with_logprobs:
            counts = [rows[i].params.logprobs or 0 for i in with_logprobs]
            tokens = _with_logprobs(raw[with_logprobs], [token_ids[i] for i in with_logprobs], counts)
            described = dict(zip(with_logprobs, tokens, strict=True))
        return [described.get(i) or SampledToken(token_id) for i, token_id in enumerate(token_ids)]

    def choose(self, logits: torch.Tensor, rows: Sequence[SamplingRow], num_unknown: Sequence[int]) -> Choice:
        """One token for each row, of rows that need the host for nothing; see `Choice`."""
        return Choice(logits, rows, num_unknown)

    def prompt_logprobs(self, logits: torch.Tensor, targets: Sequence[int], count: int) -> list[SampledToken]:
        """What ``logits`` (``[tokens, vocabulary]``) say of the tokens that follow, and of the ``count`` likeliest."""
        return _with_logprobs(logits, targets, [count] * len(targets))


class Choice:
    """One token for each row of a batch, chosen on the logits' device; nothing is waited for until `fetch`.

    The tokens are on their way to the host from the beginning, so that `fetch` waits for this batch and not for what was
    launched after it.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        rows: as `Sampler.sample`'s.
        num_unknown: for each row, how many tokens before this one are chosen and not yet in ``output_token_ids``.

    Attributes:
        token_ids: int64 ``[rows]`` on the device. A few may turn out otherwise, see `fetch`.
    """

    def __init__(self, logits: torch.Tensor, rows: Sequence[SamplingRow], num_unknown: Sequence[int]) -> None:
        self._logits = logits
        self._drawn = [i for i, row in enumerate(rows) if not row.params.greedy]
        self._racers = [rows[i].racer(num_unknown[i]) for i in self._drawn]
        settled: torch.Tensor | None = None
        if len(self._drawn) == len(rows):
            self.token_ids, settled = draw(logits, self._racers)
        else:
            self.token_ids = logits.argmax(-1)
            if self._drawn:
                # Indexing by the list itself would wait for the device.
                drawn = to_device(torch.tensor(self._drawn), logits.device)
                self.token_ids[drawn], settled = draw(logits[drawn], self._racers)
        self._chosen = self.token_ids.to("cpu", non_blocking=True)
        self._settled = None if settled is None else settled.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if logits.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(logits.device))

    def fetch(self) -> tuple[list[int], frozenset[int]]:
        """The tokens, and the rows whose token is not what ``token_ids`` said: they needed more than the likeliest few."""
        if self._arrived is not None:
            self._arrived.synchronize()
        chosen = [int(token_id) for token_id in self._chosen.tolist()]
        if self._settled is None:
            return chosen, frozenset()
        first = list(chosen)
        pending = [
            (i, racer)
            for i, racer, done in zip(self._drawn, self._racers, self._settled.tolist(), strict=True)
            if not done
        ]
        look = FIRST_LOOK
        while pending:
            look = min(8 * look, self._logits.shape[1])
            again, settled = draw(self._logits[[i for i, _ in pending]], [racer for _, racer in pending], look)
            for (i, _), token_id in zip(pending, again.tolist(), strict=True):
                chosen[i] = int(token_id)
            pending = [part for part, done in zip(pending, settled.tolist(), strict=True) if not done]
        return chosen, frozenset(i for i, token_id in enumerate(chosen) if token_id != first[i])


def _change_logits(logits: torch.Tensor, row: SamplingRow) -> None:
    """Apply bias, min_tokens and penalties to one row, in place; only the tokens concerned are touched."""
    params, device = row.params, logits.device
    if params.biases:
        logits[list(params.biases)] += torch.tensor(list(params.biases.values()), device=device)
    if row.forbidden_token_ids and len(row.output_token_ids) < params.min_tokens:
        forbidden = list(row.forbidden_token_ids)
        saved = logits[forbidden]
        logits[forbidden] = float("-inf")
        if row.grammar is not None and bool(torch.isneginf(logits).all()):
            logits[forbidden] = saved
    if params.repetition_penalty != 1.0:
        seen = torch.tensor(sorted({*map(int, row.prompt_token_ids), *row.output_token_ids}), device=device)
        values = logits[seen]
        penalty = params.repetition_penalty
        logits[seen] = torch.where(values > 0, values / penalty, values * penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.output_token_ids:
        counts = Counter(row.output_token_ids)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=device)
        logits[list(counts)] -= params.presence_penalty + params.frequency_penalty * times


def _with_logprobs(logits: torch.Tensor, token_ids: Sequence[int], counts: Sequence[int]) -> list[SampledToken]:
    """Each row's token with its log-probability, and those of the row's ``counts`` likeliest."""
    if not token_ids:
        return []
    chosen = torch.tensor(token_ids, device=logits.device).unsqueeze(1)
    totals = torch.logsumexp(logits, -1, keepdim=True)
    own = logits.gather(1, chosen)
    ranks = ((logits > own).sum(-1) + 1).tolist()
    values, ids = torch.topk(logits, max(counts))
    tokens = []
    for i, (token_id, count, logprob, likeliest, logprobs) in enumerate(
        zip(
            token_ids, counts, (own - totals).squeeze(1).tolist(), ids.tolist(), (values - totals).tolist(), strict=True
        )
    ):
        entries = list(zip(likeliest[:count], logprobs[:count], range(1, count + 1), strict=True))
        if token_id not in likeliest[:count]:
            entries.append((token_id, logprob, ranks[i]))
        tokens.append(SampledToken(token_id, logprob, tuple(entries)))
    return tokens
