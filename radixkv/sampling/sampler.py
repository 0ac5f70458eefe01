"""Samples one token per row of a batch's logits.

Random numbers belong to the request, never to the batch: every draw (`radixkv.sampling.exponential`) uses variates that are a
pure function of the request's seed, the sample, the token's index and the candidate's token id. So a draw depends neither on
the rest of the batch, nor on what was cached, nor on preemption; there is no generator state to lose.

The limit of this: another batch shape can change the order of additions in a matrix product, and so a logit by about 1e-6
relative. A draw then differs only if its two best candidates are that close. (Inverting the cumulative distribution would be
cheaper, but each border between two tokens moves by the sum of all changes before it: of 1,400 tokens sampled at temperature
1, alone and in a batch of 32, three differed.)
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from radixkv.memory.upload import to_device
from radixkv.sampling.exponential import draw
from radixkv.sampling.grammar.mask import apply_grammar_bitmask
from radixkv.sampling.grammar.state import GrammarState
from radixkv.sampling.host_draw import argmax_rows
from radixkv.sampling.logit_changes import LogitChanges
from radixkv.sampling.logprobs import SampledToken, with_logprobs
from radixkv.sampling.penalties import Penalties, TokenCounts
from radixkv.sampling.variates import SamplingRow
from radixkv.sampling_params import SamplingParams


@dataclass(eq=False)
class SamplingState:
    """What the sampler needs of one sequence; the engine owns it and appends to ``output_token_ids``.

    Attributes:
        seed: the request's.
        sample_index: which of the request's samples.
        changes: of the logits; all samples of a request may share them.
        grammar: constrains the output; None: unconstrained.
    """

    params: SamplingParams
    seed: int
    sample_index: int
    prompt_token_ids: Sequence[int] | NDArray[np.int32]
    changes: LogitChanges
    output_token_ids: list[int] = field(default_factory=list)
    grammar: GrammarState | None = None

    def __post_init__(self) -> None:
        # Used in every step: what does not change is looked up once.
        params, changes = self.params, self.changes
        self.greedy = params.greedy
        self._counts: TokenCounts | None = None
        if changes.penalizes:
            self._counts = TokenCounts(self.prompt_token_ids if params.repetition_penalty != 1.0 else ())
        self._always_needs_host = changes.always or self.grammar is not None or params.logprobs is not None

    def row(self, num_placeholders: int = 0) -> SamplingRow:
        """What the draw of the next token depends on, or of the token ``num_placeholders`` later."""
        return SamplingRow(self.params, self.seed, self.sample_index, len(self.output_token_ids) + num_placeholders)

    @property
    def needs_host(self) -> bool:
        """Whether sampling involves more than logits and random numbers: earlier tokens, a grammar, or log-probabilities."""
        return self._always_needs_host or len(self.output_token_ids) < self.changes.num_masked_steps

    @property
    def changes_logits(self) -> bool:
        """Whether anything but a grammar changes the next token's logits."""
        return self.changes.always or len(self.output_token_ids) < self.changes.num_masked_steps

    def change_logits(self, logits: torch.Tensor, first: int, drafts: Sequence[int], penalties: Penalties) -> None:
        """Apply all changes to this sequence's logits except a grammar's and penalties, in place.

        Args:
            logits: ``[rows, vocabulary]``.
            first: the row for the next token; each row behind it is for the token after one more draft.
            drafts: tokens that may follow.
            penalties: of all rows; those of this sequence are added to it.
        """
        num_tokens = len(self.output_token_ids)
        try:
            for row, draft in enumerate([*drafts, None], first):
                if self.changes_logits:
                    self.changes.apply(logits, row, self.output_token_ids, self.grammar is not None)
                    if self._counts is not None:
                        penalties.add(row, self.params, *self._counts.update(self.output_token_ids))
                if draft is not None:
                    self.output_token_ids.append(draft)
        finally:
            if self._counts is not None:
                self._counts.rewind(self.output_token_ids, num_tokens)
            del self.output_token_ids[num_tokens:]


def sample(
    logits: torch.Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]] | None = None
) -> list[SampledToken]:
    """One token for each row of ``logits``, float32 ``[rows, vocabulary]``.

    Logits are masked by grammars and ``allowed_token_ids``, biased, masked by ``bad_words`` and ``min_tokens``, penalized,
    divided by the temperature, then truncated by min_p, top_k and top_p, in that order. Reported log-probabilities are the
    model's own, from before all that.

    Args:
        logits: one row for each state, and behind it one for each of its drafts.
        drafts: for each sequence, tokens that may come next: its rows are for the next token, for the one after the first
            draft, and so on. The states are left unchanged. None: there are no drafts.
    """
    raw = logits
    logits = changed_logits(logits, states, drafts or [()] * len(states))
    num_placeholders = [0] * len(states)
    if drafts is not None:
        num_placeholders = [i for draft in drafts for i in range(1 + len(draft))]
        states = [state for state, draft in zip(states, drafts, strict=True) for _ in range(1 + len(draft))]
    token_ids = InFlightTokens(logits, states, num_placeholders).fetch()
    described: dict[int, SampledToken] = {}
    wanted = [i for i, state in enumerate(states) if state.params.logprobs is not None]
    if wanted:
        counts = [states[i].params.logprobs or 0 for i in wanted]
        rows = raw if len(wanted) == len(states) else raw[wanted]
        tokens = with_logprobs(rows, [token_ids[i] for i in wanted], counts)
        described = dict(zip(wanted, tokens, strict=True))
    return [described.get(i) or SampledToken(token_id) for i, token_id in enumerate(token_ids)]


def changed_logits(
    logits: torch.Tensor, states: Sequence[SamplingState], drafts: Sequence[Sequence[int]]
) -> torch.Tensor:
    """The logits as grammars and parameters change them: a copy, if they change anything; see `sample`."""
    firsts = list(itertools.accumulate((1 + len(draft) for draft in drafts), initial=0))[:-1]
    changed = [i for i, state in enumerate(states) if state.changes_logits]
    grammars = {first: state.grammar for first, state in zip(firsts, states, strict=True) if state.grammar is not None}
    if not changed and not grammars:
        return logits
    logits = logits.clone(memory_format=torch.contiguous_format)
    if grammars:
        apply_grammar_bitmask(logits, grammars, dict(zip(firsts, drafts, strict=True)))
    penalties = Penalties()
    for i in changed:
        states[i].change_logits(logits, firsts[i], drafts[i], penalties)
    penalties.apply(logits)
    return logits


class InFlightTokens:
    """One token for each row of a batch, sampled on the logits' device and being copied to the host.

    The copy starts at once, so that `fetch` waits for this batch and not for what was launched after it.

    Args:
        logits: float32 ``[rows, vocabulary]``.
        states: of the rows' sequences; none of them `needs_host`, unless its logits are changed already.
        num_placeholders: for each row, how many tokens before this one are sampled and not yet in ``output_token_ids``.

    Attributes:
        token_ids: int64 ``[rows]`` on the device.
    """

    def __init__(self, logits: torch.Tensor, states: Sequence[SamplingState], num_placeholders: Sequence[int]) -> None:
        drawn = [i for i, state in enumerate(states) if not state.greedy]
        rows = [states[i].row(num_placeholders[i]) for i in drawn]
        if len(drawn) == len(states):
            self.token_ids = draw(logits, rows)
        else:
            self.token_ids = argmax_rows(logits) if logits.device.type == "cpu" else logits.argmax(-1)
            if drawn:
                # Indexing by the list itself would synchronize with the device.
                indices = to_device(torch.tensor(drawn), logits.device)
                self.token_ids[indices] = draw(logits[indices], rows)
        self._on_host = self.token_ids.to("cpu", non_blocking=True)
        self._arrived: torch.cuda.Event | None = None
        if logits.device.type == "cuda":
            self._arrived = torch.cuda.Event()
            self._arrived.record(torch.cuda.current_stream(logits.device))

    def fetch(self) -> list[int]:
        """The tokens."""
        if self._arrived is not None:
            self._arrived.synchronize()
        token_ids: list[int] = self._on_host.tolist()
        return token_ids


def sample_in_every_way(logits: torch.Tensor) -> None:
    """Sample a token per row of ``logits`` in every way, alone and mixed: this compiles every kernel, and takes most memory.

    Truncation takes twice the memory of the logits. In a mixed batch, rows are copied twice before that: first those that are
    drawn, then those of them that are truncated.
    """
    greedy, drawn, truncated = (
        SamplingState(params, 0, 0, (), LogitChanges(params))
        for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_p=0.9))
    )
    count = len(logits)
    for states in ([drawn] * count, [truncated] * count, [greedy, drawn, *[truncated] * count][:count]):
        InFlightTokens(logits, states, [0] * count)
