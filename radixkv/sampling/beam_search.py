"""Beam search over block tables: which continuations keep running, which are finished.

The rules are those of transformers' `generate` (``early_stopping=False``), so that results are equal: of all beams'
continuations the best ``2 x width`` are candidates, or ``(1 + end tokens) x width`` if that is more; those that end among
the best ``width`` compete for the ``width`` finished beams by ``score / length ** length_penalty``; the best ``width`` of the
rest keep running; the search ends when no running beam, scored at its present length, beats the worst finished one.

Blocks are the engine's: it forks and closes block tables by `Continuation.parent`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from radixkv.outputs import FinishReason
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.grammar.mask import apply_grammar_bitmask
from radixkv.sampling.grammar.state import GrammarState
from radixkv.sampling.logprobs import TokenLogprob
from radixkv.sampling_params import BeamSearchParams


@dataclass(frozen=True, slots=True)
class Continuation:
    """Beam ``parent`` continued by ``token_id``.

    Attributes:
        score: sum of the log-probabilities of all generated tokens, this one included.
        logprob: this token's own.
        rank: this token's rank among its parent's continuations, from 1.
        top_logprobs: those of the parent's best continuations, where requested; under a grammar, of those that it allows.
    """

    parent: int
    token_id: int
    score: float
    logprob: float
    rank: int
    top_logprobs: list[TokenLogprob]


@dataclass(frozen=True, slots=True)
class FinishedBeam:
    """A finished beam; ``history`` has its continuations from the first generated token to the last."""

    history: tuple[Continuation, ...]
    penalized_score: float
    finish_reason: FinishReason
    stop_reason: int | str | None

    @property
    def token_ids(self) -> list[int]:
        return [continuation.token_id for continuation in self.history]


class _Beam(NamedTuple):
    """A running beam: its continuations, its text where there are stop strings, and its grammar where it has one."""

    history: tuple[Continuation, ...]
    text: IncrementalDetokenizer | None
    grammar: GrammarState | None


# Why a beam ends, and the stop string where that is why.
_Finish = tuple[FinishReason, str | None]


class BeamSearch:
    """The state of one search.

    Args:
        text: the detokenizer of an empty answer, which finds stop strings; None: there are none.
        grammar: constrains every beam; None: unconstrained.
    """

    def __init__(
        self,
        params: BeamSearchParams,
        max_tokens: int,
        end_token_ids: frozenset[int],
        text: IncrementalDetokenizer | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self._params = params
        self._max_tokens = max_tokens
        self._end_token_ids = end_token_ids
        self._beams = [_Beam((), text, None if grammar is None else grammar.fork())]
        self._finished: list[FinishedBeam] = []

    @property
    def num_generated(self) -> int:
        """How many tokens each running beam has."""
        return len(self._beams[0].history)

    def results(self) -> list[FinishedBeam]:
        """The finished beams, best first."""
        return list(self._finished)

    def advance(self, logits: torch.Tensor) -> list[Continuation]:
        """Choose the next tokens.

        Args:
            logits: float32 ``[running beams, vocabulary]``.

        Returns:
            The beams that keep running, best first, at most the width; none when the search is done.

        Raises:
            StructuredOutputError: the grammar cannot be followed further.
        """
        running: list[_Beam] = []
        ended: list[FinishedBeam] = []
        length = self.num_generated + 1
        for rank, candidate in enumerate(self._candidates(logits)):
            beam, finish = self._continued(candidate)
            if finish is None:
                running.append(beam)
            elif rank < self._params.beam_width:
                ended.append(FinishedBeam(beam.history, self._penalize(candidate.score, length), *finish))
        # The sort is stable: of equal scores, the beam that finished earlier is kept.
        self._finished = sorted(self._finished + ended, key=lambda beam: -beam.penalized_score)
        del self._finished[self._params.beam_width :]

        continuations = [beam.history[-1] for beam in running[: self._params.beam_width]]
        if not continuations or not self._can_improve(continuations[0].score, length):
            return []
        self._beams = running[: self._params.beam_width]
        return continuations

    def _continued(self, candidate: Continuation) -> tuple[_Beam, _Finish | None]:
        """The beam that a candidate makes of its parent, and why it ends with it; None: it does not."""
        parent, token_id = self._beams[candidate.parent], candidate.token_id
        beam = _Beam(
            (*parent.history, candidate),
            None if parent.text is None else parent.text.fork(),
            None if parent.grammar is None else parent.grammar.fork(),
        )
        stop_string = None if beam.text is None else beam.text.append([token_id])
        if beam.grammar is not None:
            beam.grammar.advance(token_id)
            if beam.grammar.failure is not None:
                raise beam.grammar.failure
        if token_id in self._end_token_ids:
            return beam, ("stop", None)
        if stop_string is not None:
            return beam, ("stop", stop_string)
        if beam.grammar is not None and beam.grammar.complete:
            return beam, ("stop", None)
        return beam, ("length", None) if len(beam.history) >= self._max_tokens else None

    def _candidates(self, logits: torch.Tensor) -> Sequence[Continuation]:
        """The best continuations of all beams: enough that ``width`` keep running even if every end token is among them."""
        width, vocab_size = self._params.beam_width, logits.shape[1]
        count = max(2, 1 + len(self._end_token_ids)) * width
        if self._params.temperature >= 1e-5:
            logits = logits / self._params.temperature
        # Only each row's top-k are needed: their log-softmax takes the row's log-sum-exp, but no new matrix.
        num_top = self._params.logprobs or 0
        per_beam = min(max(count, num_top), vocab_size)
        allowed = logits
        grammars = {row: beam.grammar for row, beam in enumerate(self._beams) if beam.grammar is not None}
        if grammars:
            allowed = logits.clone()
            apply_grammar_bitmask(allowed, grammars)
        # Probabilities are over the whole vocabulary, as in transformers' constrained beam search.
        top_logits, token_ids = torch.topk(allowed, per_beam)
        logprobs = top_logits - torch.logsumexp(logits, dim=-1, keepdim=True)
        parent_scores = [[beam.history[-1].score if beam.history else 0.0] for beam in self._beams]
        scores = logprobs + torch.tensor(parent_scores, dtype=torch.float32, device=logits.device)
        top_scores, flat_indices = torch.topk(scores.view(-1), min(count, scores.numel()))
        top_logprobs = [
            [
                (token_id, logprob, rank)
                for rank, (token_id, logprob) in enumerate(zip(row_ids, row_logprobs, strict=True), start=1)
                if logprob > -math.inf
            ]
            for row_ids, row_logprobs in zip(
                token_ids[:, :num_top].tolist(), logprobs[:, :num_top].tolist(), strict=True
            )
        ]
        columns = (top_scores, flat_indices, token_ids.view(-1)[flat_indices], logprobs.view(-1)[flat_indices])
        return [
            Continuation(
                parent=flat_index // per_beam,
                token_id=token_id,
                score=score,
                logprob=logprob,
                rank=flat_index % per_beam + 1,
                top_logprobs=top_logprobs[flat_index // per_beam],
            )
            for score, flat_index, token_id, logprob in zip(*(column.tolist() for column in columns), strict=True)
            if score != -math.inf  # NaNs stay: a model that gives them is answered, as where tokens are drawn
        ]

    def _can_improve(self, best_running_score: float, length: int) -> bool:
        if len(self._finished) < self._params.beam_width:
            return True
        return self._penalize(best_running_score, length) > self._finished[-1].penalized_score

    def _penalize(self, score: float, length: int) -> float:
        return float(score / length**self._params.length_penalty)
