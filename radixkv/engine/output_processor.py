"""From what a step brought to sequences that go on, part, or end."""

from __future__ import annotations

import time
from typing import Any

import torch

from radixkv.engine.batch import LaunchedStep
from radixkv.engine.completion import append_token
from radixkv.errors import StructuredOutputError
from radixkv.sampling.sampler import SampledToken, Sampler
from radixkv.scheduling.request import Request, Sequence, SequenceGroup
from radixkv.scheduling.scheduler import Scheduler


class ResultTaker:
    """Takes steps in for one engine, whose parts it is given."""

    def __init__(self, scheduler: Scheduler, sampler: Sampler, tokenizer: Any) -> None:
        self._scheduler = scheduler
        self._sampler = sampler
        self._tokenizer = tokenizer

    def take(self, step: LaunchedStep, following: LaunchedStep | None = None) -> list[Request]:
        """Take in the tokens of a step, and end or fork sequences.

        Args:
            following: the step that was launched from the tokens of this one.

        Returns:
            The requests that got tokens or ended; those with a ``failure`` are still to be discarded.
        """
        touched: dict[Request, None] = {}
        if step.sampled:
            touched.update(dict.fromkeys(self._accept_tokens(step, following)))
        for group, rows in step.beams:
            touched[group.request] = None
            self._advance_beams(group, step.logits[rows])
        return list(touched)

    def _accept_tokens(self, step: LaunchedStep, following: LaunchedStep | None) -> list[Request]:
        """Give sequences their tokens, and let go of those that have ended; returns whose they are."""
        redrawn: frozenset[int] = frozenset()
        if step.choice is None:
            states = [sequence.row for _, sequence, _ in step.sampled if sequence.row is not None]
            tokens = self._sampler.sample(step.logits_of_sampled(), states)
        else:
            token_ids, redrawn = step.choice.fetch()
            tokens = [SampledToken(token_id) for token_id in token_ids]
        now = time.monotonic()
        touched: list[Request] = []
        for place, ((group, sequence, _), token) in enumerate(zip(step.sampled, tokens, strict=True)):
            if sequence.table is None or sequence in step.void:
                continue  # it ended, or was given up, when this step was launched already
            touched.append(sequence.request)
            append_token(sequence, token, self._tokenizer)
            if place in redrawn and following is not None and following.computes(sequence):
                # The step after this one computed another token in its place: that has to be done again.
                following.void.add(sequence)
                sequence.forget_unknown()
                sequence.num_computed -= 1
            self._scheduler.record_at_border(sequence)
            if sequence.request.metrics.first_token_time is None:
                sequence.request.metrics.first_token_time = now
            if sequence.row is not None and sequence.row.grammar is not None:
                sequence.request.failure = sequence.request.failure or sequence.row.grammar.failure
            if sequence.finish_reason is not None:
                sequence.forget_unknown()
                self._scheduler.release(sequence)
                self._scheduler.remove(group)
        return touched

    def _advance_beams(self, group: SequenceGroup, logits: torch.Tensor) -> None:
        """One beam step, by block tables alone: drop the losers, fork the parents of several, continue the rest."""
        request = group.request
        assert request.beams is not None
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        try:
            chosen = request.beams.advance(logits)
        except StructuredOutputError as error:
            request.failure = error
            return
        heirs = [0] * len(group.sequences)
        for continuation in chosen:
            heirs[continuation.parent] += 1
        lines: list[list[Sequence]] = []
        for sequence, count in zip(group.sequences, heirs, strict=True):
            if count:
                lines.append([sequence, *(self._scheduler.fork(sequence, count - 1) if count > 1 else [])])
            else:
                self._scheduler.drop(sequence) if chosen else self._scheduler.release(sequence)
                lines.append([])
        group.sequences = [lines[continuation.parent].pop() for continuation in chosen]
        for sequence, continuation in zip(group.sequences, chosen, strict=True):
            sequence.token_ids.append(continuation.token_id)
        if chosen:
            request.sequences = list(group.sequences)
            return
        self._scheduler.remove(group)
        for sequence in request.sequences:
            sequence.finish_reason = "stop"
