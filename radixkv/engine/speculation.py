"""Which drafts are verified in a step, and what is learned from it.

::

    schedule ──> draft ──────────────────────────> execute ──> process ──────────────────> learn
                 every drafter is asked; the        rows for    drawn tokens are appended   rates and step times
                 best drafts get rows while         drafts      for as long as drafts       are learned
                 rows are worth their time                      proved right
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from operator import index
from typing import NamedTuple

from radixkv.drafting import Draft, DraftContext, Drafter
from radixkv.drafting.acceptance import AcceptanceRates, matching
from radixkv.drafting.drafter import NO_DRAFT
from radixkv.drafting.lengths import choose_lengths
from radixkv.drafting.sequence_drafts import SequenceDrafts
from radixkv.drafting.step_times import StepTimes
from radixkv.outputs import DraftCounts
from radixkv.scheduling.batch import AskedSequence, Batch
from radixkv.scheduling.request import TokenSequence
from radixkv.scheduling.sequence_blocks import SequenceBlocks

_log = logging.getLogger(__name__)

# Where steps are launched before the last one's tokens are known, drafters are asked at least once in this many steps.
_ASKED_EVERY = 16
# Among this many sequences or more, one whose drafts were wrong more than `_MAX_WRONG` times is asked about in one step of 2,
# 4, 8 or 16, doubling with each further miss; a hit cancels two misses. The steps are the same for all such sequences, so
# that few steps carry drafts.
_MANY_SEQUENCES = 5
_MAX_WRONG = 3
_MOST_SKIPPED = 4
# Drafts that are right less often than this do not make a step wait for tokens.
_WORTH_WAITING = 0.5


class _Candidate(NamedTuple):
    """A sequence's best draft. As many of its tokens are verified as are worth their time."""

    sequence: TokenSequence
    source: str
    token_ids: Sequence[int]
    rate: float


class Speculator:
    """Drafts for the batches of one engine.

    Args:
        drafters: asked in this order; of equally promising drafts, the first is taken.
        max_tokens: of a draft.
        max_rows: rows that drafts may add to a batch.
        max_batched_tokens: of a batch.

    Attributes:
        counts: drafted and accepted tokens by source, since the engine was made.
    """

    def __init__(
        self,
        drafters: Sequence[Drafter],
        blocks: SequenceBlocks,
        *,
        max_tokens: int,
        max_rows: int,
        max_batched_tokens: int,
        vocab_size: int,
        clock: Callable[[], float],
    ) -> None:
        self._drafters = drafters
        self._blocks = blocks
        self._max_tokens = max_tokens
        self._max_rows = max_rows
        self._max_batched_tokens = max_batched_tokens
        self._vocab_size = vocab_size
        self._clock = clock
        self._rates = AcceptanceRates()
        self._times = StepTimes()
        self._warned: set[str] = set()
        self._started = 0.0
        self._landed: float | None = None
        self._num_unasked = 0
        self._num_steps = 0
        # Rows of the last batch that drafts were made for, if they got none beside them: nor will they beside more.
        self._declined_rows = math.inf
        self.counts: dict[str, DraftCounts] = {}

    def wants_tokens(self, batch: Batch) -> bool:
        """Whether the next step should wait for the tokens of a batch in flight: drafters see none that are in flight.

        True while the latest drafts seem good and are worth their rows; otherwise in one step of `_ASKED_EVERY`.
        """
        if not batch.sampled:
            return False  # only prompts: nothing is drafted behind them
        self._num_unasked += 1
        if self._num_unasked >= _ASKED_EVERY:
            return True
        if len(batch.sampled) >= self._declined_rows:
            return False
        for row in batch.sampled:
            drafts = row.sequence.drafts
            if drafts is not None and any(
                self._rates.rate(source, draft.strength, drafts.rates) > _WORTH_WAITING and len(draft.token_ids) > 1
                for source, draft in drafts.proposed.items()
            ):
                return True
        return False

    def draft(self, batch: Batch) -> None:
        """Give the batch the drafts that are worth verifying, with writable slots for them."""
        self._num_steps += 1
        candidates: list[_Candidate] = []
        asks_all = len(batch.chunks) < _MANY_SEQUENCES or self._num_unasked >= _ASKED_EVERY
        for _, sequence, _, completes in batch.chunks:
            drafts = sequence.drafts
            if drafts is not None and not asks_all and self._num_steps % _interval(drafts):
                drafts.proposed = {}  # however good: it is out of date, and no step should wait for what follows it
            elif completes and _takes_drafts(sequence):
                drafts = self._drafts_of(sequence)
                best = self._best(sequence, drafts)
                if best is not None:
                    candidates.append(best)
                source = None if best is None else best.source
                batch.asked.append(AskedSequence(sequence, len(sequence.token_ids), drafts.proposed, source))
        if batch.asked and not any(chunk.sequence.num_placeholders for chunk in batch.chunks):
            self._num_unasked = 0  # not when prompts alone were asked about, behind which others' tokens are in flight
        if candidates:
            self._choose(batch, candidates)
        self._started = self._clock()

    def learn(self, batch: Batch) -> None:
        """Learn from the batch that `draft` was called with, now that it is processed."""
        self._compare(batch)
        if batch.chunks and not batch.beam_steps and all(chunk.num_tokens == 1 for chunk in batch.chunks):
            self._times.observe(batch.num_tokens, self._clock() - self._started, drafting=bool(batch.drafts))

    def landed(self, batch: Batch | None, following: Batch) -> None:
        """Learn from a batch that was launched ahead and is processed now; it took the time since the one before it was.

        Args:
            batch: without drafts; None: nothing was in flight, so the time until now was idle.
            following: the batch launched meanwhile; empty: none was.
        """
        now = self._clock()
        if batch is None:
            self._landed = None
            return
        self._compare(batch)
        if self._landed is not None and all(chunk.num_tokens == 1 for chunk in batch.chunks):
            self._times.observe(batch.num_tokens, now - self._landed, drafting=False)
        self._landed = now if following.chunks else None

    def _compare(self, batch: Batch) -> None:
        """Learn from the tokens of a processed batch how good the drafts for it were, verified or not."""
        for sequence, num_tokens, proposed, source_of_best in batch.asked:
            drafts = sequence.drafts
            if drafts is None:
                continue
            tokens = sequence.token_ids[num_tokens : sequence.num_known_tokens]
            for source, draft in proposed.items():
                self._rates.learn(source, draft, tokens, drafts.rates)
            right = any(draft.token_ids[:1] == tokens[:1] for draft in proposed.values())
            wrong = max(drafts.num_wrong - 2, 0) if right else drafts.num_wrong + 1
            drafts.num_wrong = min(wrong, _MAX_WRONG + _MOST_SKIPPED)
            verified = batch.drafts.get(sequence)
            if verified is not None and source_of_best is not None:
                self._count(sequence, source_of_best, len(verified), matching(verified, tokens))

    def _best(self, sequence: TokenSequence, drafts: SequenceDrafts) -> _Candidate | None:
        """Ask every drafter, and return the draft with the most tokens that can be expected to be right."""
        request = sequence.request
        num_generated = len(sequence.token_ids) - request.num_prompt_tokens
        most = min(self._max_tokens, request.max_new_tokens - num_generated - 1)
        drafts.proposed = {}
        if most <= 0:
            return None
        best, expected = None, 0.0
        for drafter in self._drafters:
            draft = self._ask(drafter, drafts.context, most)
            if not draft.token_ids:
                continue
            drafts.proposed[drafter.source] = draft
            rate = self._rates.rate(drafter.source, draft.strength, drafts.rates)
            tokens = rate * (1 - rate ** len(draft.token_ids)) / (1 - rate)
            if tokens > expected:
                best, expected = _Candidate(sequence, drafter.source, draft.token_ids, rate), tokens
        if best is None:
            return None
        token_ids = self._useful(sequence, best.token_ids)
        return best._replace(token_ids=token_ids) if token_ids else None

    def _ask(self, drafter: Drafter, context: DraftContext, most: int) -> Draft:
        try:
            draft = drafter.draft(context, most)
            if not isinstance(draft, Draft):
                raise TypeError(f"expected a Draft, got {draft!r:.80}")
            # A list from here on, whatever it was before: nothing done with it later may raise.
            token_ids, strength = [index(token_id) for token_id in draft.token_ids], index(draft.strength)
            if len(token_ids) > most:
                raise ValueError(f"expected at most {most} tokens, got {len(token_ids)}")
            if token_ids and not 0 <= min(token_ids) <= max(token_ids) < self._vocab_size:
                raise ValueError(f"expected ids from 0 to {self._vocab_size - 1}, got {token_ids!r:.80}")
        except Exception as error:  # a drafter may be the user's, and a draft is never needed
            if drafter.source not in self._warned:
                self._warned.add(drafter.source)
                _log.warning(
                    "drafter %r: its draft is dropped (reported once): %s: %s",
                    drafter.source, type(error).__name__, error,
                )  # fmt: skip
            return NO_DRAFT
        return Draft(token_ids, strength)

    @staticmethod
    def _drafts_of(sequence: TokenSequence) -> SequenceDrafts:
        drafts = sequence.drafts
        if drafts is None:
            request = sequence.request
            context = DraftContext(
                sequence.token_ids,
                request.num_prompt_tokens,
                request.namespace,
                request.read_cache,
                request.write_cache,
                prediction=request.prediction,
                grammar=None if sequence.sampling is None else sequence.sampling.grammar,
            )
            drafts = sequence.drafts = SequenceDrafts(context)
        drafts.context.table = sequence.table
        return drafts

    @staticmethod
    def _useful(sequence: TokenSequence, token_ids: Sequence[int]) -> Sequence[int]:
        """The draft up to a token that the grammar does not allow, or that ends the answer: the row before it draws that."""
        state = sequence.sampling
        assert state is not None
        ends = sequence.request.end_token_ids | state.params.end_token_ids
        for position, token_id in enumerate(token_ids):
            if token_id in ends:
                token_ids = token_ids[:position]
                break
        if state.grammar is not None and token_ids:
            token_ids = token_ids[: state.grammar.num_before_end(token_ids)]
        return token_ids

    def _choose(self, batch: Batch, candidates: list[_Candidate]) -> None:
        """Give the batch as many rows for drafts as are worth their time, and as there are blocks for."""
        rates = [candidate.rate for candidate in candidates]
        sizes = [len(candidate.token_ids) for candidate in candidates]
        num_sampled = sum(chunk.completes for chunk in batch.chunks)
        num_rows = batch.num_tokens
        max_new_rows = min(self._max_rows, self._max_batched_tokens - num_rows)
        lengths = choose_lengths(rates, sizes, num_rows, num_sampled, self._times, max_new_rows)
        for candidate, length in zip(candidates, lengths, strict=True):
            if not length:
                continue
            sequence = candidate.sequence
            length = self._blocks.reserve_free(sequence, sequence.num_pending + length) - sequence.num_pending
            if length > 0:
                batch.drafts[sequence] = candidate.token_ids[:length]
        self._declined_rows = math.inf if batch.drafts else num_rows

    def _count(self, sequence: TokenSequence, source: str, num_drafted: int, num_accepted: int) -> None:
        for counts in (self.counts, sequence.request.metrics.drafts):
            entry = counts.setdefault(source, DraftCounts())
            entry.drafted += num_drafted
            entry.accepted += num_accepted


def _takes_drafts(sequence: TokenSequence) -> bool:
    """Whether drafts may follow a chunk that completes a sequence."""
    request, state = sequence.request, sequence.sampling
    if state is None or sequence.num_placeholders:
        return False
    if len(request.sequences) < request.num_seqs or request.lacks_prompt_logprobs:
        return False  # its samples are about to fork, or its rows are the prompt's
    return state.grammar is None or not state.grammar.budget.in_debt


def _interval(drafts: SequenceDrafts) -> int:
    """Among many sequences, this one is asked about once in how many steps."""
    return 1 << max(drafts.num_wrong - _MAX_WRONG, 0)
