"""Processes an executed batch: sequences get their tokens and continue, fork, or end."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

import torch

from radixkv.engine.sampled_token import TokenDecoder, append_token, logprobs_with_text
from radixkv.errors import StructuredOutputError
from radixkv.sampling.grammar.budget import costs, settle
from radixkv.sampling.logprobs import SampledToken
from radixkv.sampling.sampler import sample
from radixkv.scheduling.batch import Batch
from radixkv.scheduling.fair_shares import COMPUTED_TOKEN_COST, GENERATED_TOKEN_COST
from radixkv.scheduling.request import Request, SequenceGroup, TokenSequence
from radixkv.scheduling.scheduler import Scheduler


@dataclass(slots=True)
class Processed:
    """The outcome of a batch; both lists may hold a request more than once.

    Attributes:
        touched: the requests that got tokens or ended.
        changed: those of them that may have ended or failed.
        num_right: drafted tokens that were right.
    """

    touched: list[Request] = field(default_factory=list)
    changed: list[Request] = field(default_factory=list)
    num_right: int = 0


class OutputProcessor:
    """Processes the batches of one engine."""

    def __init__(self, scheduler: Scheduler, decode: TokenDecoder, clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._clock = clock
        self._step_began = 0.0
        self._blocks = scheduler.blocks
        self._decode = decode

    def begin_step(self) -> None:
        """A step begins: the time that grammars take of it is counted from now."""
        self._step_began = self._clock()

    def process(self, batch: Batch) -> Processed:
        """Append the tokens of a batch, and end or fork sequences."""
        processed = Processed()
        if batch.sampled:
            self._append_tokens(batch, processed)
        for group, rows in batch.beam_steps:
            processed.touched.append(group.request)
            self._advance_beams(group, batch.logits[rows])
            processed.changed.append(group.request)
        self._settle_grammars(batch, processed)
        return processed

    def _settle_grammars(self, batch: Batch, processed: Processed) -> None:
        """Charge tenants for the time that their grammars took from all others, and fail the requests that took too much."""
        budgets = {
            request: request.grammar.budget
            for request in [row.group.request for row in batch.sampled]
            + [step.group.request for step in batch.beam_steps]
            if request.grammar is not None
        }
        if not budgets:
            return
        scheduler = self._scheduler
        if scheduler.running or scheduler.waiting:  # otherwise no tenant's counter is compared with another's
            num_generated = sum(chunk.completes for chunk in batch.chunks)
            num_computed = sum(chunk.num_tokens for chunk in batch.chunks) - num_generated
            served = COMPUTED_TOKEN_COST * num_computed + GENERATED_TOKEN_COST * (num_generated + processed.num_right)
            prices = costs(budgets.values(), served, self._clock() - self._step_began)
            for request, price in zip(budgets, prices, strict=True):
                if price > 0:
                    scheduler.shares.charge_cost(request.tenant, price)
        for request, failure in zip(budgets, settle(budgets.values()), strict=True):
            if failure is None or request.failure is not None:
                continue
            if any(sequence.finish_reason is None for sequence in request.sequences):
                request.failure = failure
                processed.touched.append(request)
                processed.changed.append(request)

    def _append_tokens(self, batch: Batch, processed: Processed) -> None:
        """Give sequences their tokens, and close those that have ended."""
        host_tokens: list[SampledToken] | None = None
        if batch.tokens is None:
            host_tokens = sample(
                batch.sampled_logits(), batch.sampling_states, batch.sampled_drafts() if batch.drafts else None
            )
            token_ids = [token.token_id for token in host_tokens]
        else:
            token_ids = batch.tokens.fetch()
        now = time.monotonic()
        row = 0
        for group, sequence, _ in batch.sampled:
            draft = batch.drafts.get(sequence, ()) if batch.drafts else ()
            drawn = range(row, row + 1 + len(draft))
            row = drawn.stop
            if sequence.table is None:
                continue  # it ended, or was aborted, after this batch was launched
            request = sequence.request
            processed.touched.append(request)
            if host_tokens is not None:
                processed.num_right += self._append_drawn(sequence, host_tokens[drawn.start : drawn.stop], draft)
            else:
                append_token(sequence, token_ids[drawn.start])
            if sequence.num_computed == sequence.num_known_tokens:
                # The following batch has computed this token, without its id being known on the host.
                self._blocks.publish_at_block_boundary(sequence)
            if request.metrics.first_token_time is None:
                request.metrics.first_token_time = now
            if sequence.finish_reason is not None:
                sequence.drop_placeholders()
                self._blocks.close(sequence)
                self._scheduler.remove(group)
                processed.changed.append(request)
            elif request.failure is not None:
                processed.changed.append(request)

    def _append_drawn(self, sequence: TokenSequence, drawn: Sequence[SampledToken], draft: Sequence[int]) -> int:
        """Append the next drawn token and, for each draft that it proves right, the one that was drawn behind that draft.

        Returns:
            How many were right.
        """
        request = sequence.request
        num_right = 0
        for token, drafted in zip_longest(drawn, draft):  # the last one was drawn behind all drafts
            append_token(sequence, token.token_id)
            if token.logprob is not None:
                sequence.cumulative_logprob += token.logprob
                sequence.logprobs.append(logprobs_with_text(token, self._decode))
            if sequence.sampling is not None and sequence.sampling.grammar is not None:
                request.failure = request.failure or sequence.sampling.grammar.failure
            ended = sequence.finish_reason is not None or request.failure is not None
            if ended or token.token_id != drafted:
                break
            num_right += 1
            sequence.num_computed += 1
            self._blocks.publish_at_block_boundary(sequence)
        if draft:
            self._scheduler.shares.charge_generated(request.tenant, num_right)
            self._blocks.trim(sequence)
        return num_right

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
        # Beams of a search that has ended stay cached to their last token.
        end = self._blocks.abort if continuations else self._blocks.close
        children: list[list[TokenSequence]] = []
        for sequence, count in zip(tuple(group.sequences), num_children, strict=True):
            if count > 1:
                forks = self._blocks.fork(sequence, count - 1)
                group.sequences += forks  # in no order yet, but closed with the group if something raises
                children.append([sequence, *forks])
            elif count == 1:
                children.append([sequence])
            else:
                end(sequence)
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
