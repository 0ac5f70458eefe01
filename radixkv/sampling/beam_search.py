"""Beam search over block tables: which continuations keep running, which are finished.

The rules are those of transformers' `generate` (``early_stopping=False``), so that results are equal: of all beams'
continuations the best ``2 x width`` are candidates; those that end among the best ``width`` compete for the ``width``
finished beams by ``score / length ** length_penalty``; the best ``width`` of the rest keep running; the search ends when no
running beam, scored at its present length, beats the worst finished one.

This module knows nothing of blocks: `Continuation.parent` tells the engine which tables to fork and which to close.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from radixkv.outputs import FinishReason
from radixkv.sampling.detokenizer import IncrementalDetokenizer
from radixkv.sampling.grammar_mask import apply_grammar_bitmask
from radixkv.sampling.logprobs import TokenLogprob
from radixkv.sampling.structured_output import GrammarState
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
        self._histories: list[tuple[Continuation, ...]] = [()]
        # One per running beam, where there are stop strings or a grammar; otherwise empty.
        self._texts: list[IncrementalDetokenizer] = [] if text is None else [text]
        self._grammars: list[GrammarState] = [] if grammar is None else [grammar.fork()]
        self._finished: list[FinishedBeam] = []

    @property
    def num_generated(self) -> int:
        """How many tokens each running beam has."""
        return len(self._histories[0])

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
        running: list[Continuation] = []
        grammars: list[GrammarState] = []
        texts: list[IncrementalDetokenizer] = []
        length = self.num_generated + 1
        ended: list[FinishedBeam] = []
        for rank, candidate in enumerate(self._candidates(logits)):
            history = (*self._histories[candidate.parent], candidate)
            stop_string = None
            if self._texts:
                text = self._texts[candidate.parent].fork()
                stop_string = text.append([candidate.token_id])
            finish = self._finish_of(history, stop_string)
            if self._grammars:
                grammar = self._advanced_grammar(candidate)
                finish = ("stop", None) if finish in (None, ("length", None)) and grammar.complete else finish
                grammars += [grammar] if finish is None else []
            if self._texts and finish is None:
                texts.append(text)
            if finish is None:
                running.append(candidate)
            elif rank < self._params.beam_width:
                ended.append(FinishedBeam(history, self._penalize(candidate.score, length), *finish))
        # The sort is stable: of equal scores, the beam that finished earlier is kept.
        self._finished = sorted(self._finished + ended, key=lambda beam: -beam.penalized_score)
        del self._finished[self._params.beam_width :]

        running = running[: self._params.beam_width]
        if not running or not self._can_improve(running[0].score, length):
            return []
        self._histories = [(*self._histories[c.parent], c) for c in running]
        self._grammars = grammars[: len(running)]
        self._texts = texts[: len(running)]
        return running

    def _advanced_grammar(self, candidate: Continuation) -> GrammarState:
        grammar = self._grammars[candidate.parent].fork()
        grammar.advance(candidate.token_id)
        if grammar.failure is not None:
            raise grammar.failure
        return grammar

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
        if self._grammars:
            allowed = logits.clone()
            apply_grammar_bitmask(allowed, dict(enumerate(self._grammars)))
        # Probabilities are over the whole vocabulary, as in transformers' constrained beam search.
        top_logits, token_ids = torch.topk(allowed, per_beam)
        logprobs = top_logits - torch.logsumexp(logits, dim=-1, keepdim=True)
        parent_scores = [[history[-1].score if history else 0.0] for history in self._histories]
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
            if score > -math.inf
        ]

    def _finish_of(
        self, history: tuple[Continuation, ...], stop_string: str | None
    ) -> tuple[FinishReason, int | str | None] | None:
        if history[-1].token_id in self._end_token_ids:
            return "stop", None
        if stop_string is not None:
            return "stop", stop_string
        return ("length", None) if len(history) >= self._max_tokens else None

    def _can_improve(self, best_running_score: float, length: int) -> bool:
        if len(self._finished) < self._params.beam_width:
            return True
        return self._penalize(best_running_score, length) > self._finished[-1].penalized_score

    def _penalize(self, score: float, length: int) -> float:
        return float(score / length**self._params.length_penalty)
