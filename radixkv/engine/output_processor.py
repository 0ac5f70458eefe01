"""Processes an executed batch: sequences get their tokens and continue, fork, or end."""

from __future__ import annotations

import time
from typing import Any

import torch

from radixkv.engine.completion import append_token
from radixkv.errors import StructuredOutputError
from radixkv.sampling.sampler import SampledToken, sample
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.scheduling.scheduler import Scheduler


class OutputProcessor:
    """Processes batches for one engine, whose parts it is given."""

    def __init__(self, scheduler: Scheduler, tokenizer: Any) -> None:
        self._scheduler = scheduler
        self._blocks = scheduler.blocks
        self._tokenizer = tokenizer

    def process(self, batch: Batch, following: Batch | None = None) -> list[Request]:
        """Append the tokens of a batch, and end or fork sequences.

        Args:
            following: the batch that was launched from the tokens of this one.

        Returns:
            The requests that got tokens or ended; those with a ``failure`` are still to be discarded.
        """
        touched: dict[Request, None] = {}
        if batch.sampled:
            touched.update(dict.fromkeys(self._append_tokens(batch, following)))
        for group, rows in batch.beam_steps:
            touched[group.request] = None
            self._advance_beams(group, batch.logits[rows])
        return list(touched)

    def _append_tokens(self, batch: Batch, following: Batch | None) -> list[Request]:
        """Give sequences their tokens, and close those that have ended; returns whose they are."""
        redrawn: frozenset[int] = frozenset()
        if batch.tokens is None:
            tokens = sample(batch.sampled_logits(), batch.sampling_states)
        else:
            token_ids, redrawn = batch.tokens.fetch()
            tokens = [SampledToken(token_id) for token_id in token_ids]
        now = time.monotonic()
        touched: list[Request] = []
        for index, ((group, sequence, _), token) in enumerate(zip(batch.sampled, tokens, strict=True)):
            if sequence.table is None or sequence in batch.void:
                continue  # it had ended, or was aborted, when this batch was already launched
            request = sequence.request
            touched.append(request)
            append_token(sequence, token, self._tokenizer)
            if index in redrawn and following is not None and following.computes(sequence):
                # The following batch computed another token at this position, which has to be computed again.
                following.void.add(sequence)
                sequence.drop_placeholders()
                sequence.num_computed -= 1
            self._blocks.publish_at_block_boundary(sequence)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if sequence.sampling is not None and sequence.sampling.grammar is not None:
                request.failure = request.failure or sequence.sampling.grammar.failure
            if sequence.finish_reason is not None:
                sequence.drop_placeholders()
                self._blocks.release(sequence)
                self._scheduler.remove(group)
        return touched

    def _advance_beams(self, group: SequenceGroup, logits: torch.Tensor) -> None:
        """One beam step, by block tables alone: drop beams without a continuation, fork those with several."""
        request = group.request
        search = request.beam_search
        assert search is not None
        request.metrics.first_token_time = request.metrics.first_token_time or time.monotonic()
        try:
            continuations = search.advance(logits)
        except StructuredOutputError as error:
            request.failure = error
            return
        num_children = [0] * len(group.sequences)
        for continuation in continuations:
            num_children[continuation.parent] += 1
        children: list[list[TokenSequence]] = []
        for sequence, count in zip(group.sequences, num_children, strict=True):
            if count:
                children.append([sequence, *(self._blocks.fork(sequence, count - 1) if count > 1 else [])])
            else:
                self._blocks.drop(sequence) if continuations else self._blocks.release(sequence)
                children.append([])
        group.sequences = [children[continuation.parent].pop() for continuation in continuations]
        for sequence, continuation in zip(group.sequences, continuations, strict=True):
            sequence.token_ids.append(continuation.token_id)
        if continuations:
            request.sequences = list(group.sequences)
            return
        self._scheduler.remove(group)
        for sequence in request.sequences:
            sequence.finish_reason = "stop"
