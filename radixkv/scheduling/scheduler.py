"""Which tokens are computed in the next step, and which sequences are preempted when blocks run out.

Continuous batching with chunked prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2024): every step takes one token
of each decoding sequence first, then fills the token budget with prompts, in chunks. So a stream gets a token every step,
and no prompt, however long, delays it by more than the time of one chunk; nor does a long prompt delay short ones by more.

The `WaitingQueue` orders admission, except that a group whose prefix is in flight is skipped (`InFlightPrefixes`). If the
next group to admit does not fit, no smaller one is admitted before it, or it could starve. Admission never preempts, however
urgent the request: priorities order admission and, when blocks run out, preemption.

When blocks run out, the running group of the lowest rank (least urgent, then youngest) is preempted: its blocks stay in the
tree, where they may be evicted, and it is queued before all new groups; what survives is reused when it resumes. How seldom
that happens is bounded by `admission_control`.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np

from radixkv.cache import OutOfBlocks, PrefixCache
from radixkv.scheduling.admission_control import DecodeGrowth
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.sequence_blocks import SequenceBlocks
from radixkv.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _DeferredAdmission:
    """``group`` is the next to admit, but did not fit.

    Trying again is useless before ``num_blocks`` are available or the ``occupancy`` has changed.
    """

    group: SequenceGroup
    num_blocks: int
    occupancy: tuple[int, int]


class Scheduler:
    """Owns the waiting and running groups, and through `blocks` their block tables.

    Args:
        cache: whose blocks the sequences use.
        max_num_batched_tokens: tokens per step at most.
        max_num_seqs: concurrent sequences at most.
        waiting: the queue to use; by default one with the usual bounds.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        waiting: WaitingQueue | None = None,
    ) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.blocks = SequenceBlocks(cache)
        self.waiting = WaitingQueue(cache) if waiting is None else waiting
        # In order of rank. A dict for membership and removal in constant time.
        self.running: dict[SequenceGroup, None] = {}
        self.num_preemptions = 0
        self._in_flight_prefixes = InFlightPrefixes(cache)
        self._deferred: _DeferredAdmission | None = None
        self._queue_looked_up = False  # in this step
        self._growth: DecodeGrowth | None = None  # of the running groups, while this step admits
        self._arrivals = itertools.count()

    @property
    def num_free_seqs(self) -> int:
        """How many more sequences may run concurrently."""
        return self._max_num_seqs - sum(group.num_seqs for group in self.running)

    @property
    def deferred(self) -> SequenceGroup | None:
        """The waiting group that is the next to admit and did not fit when last tried."""
        return None if self._deferred is None else self._deferred.group

    def add(self, group: SequenceGroup) -> None:
        """Queue the group of a new request."""
        group.request.arrival = next(self._arrivals)
        self.waiting.add(group)

    def start(self, group: SequenceGroup) -> None:
        """Run a group that has its block tables: one that was admitted, or forked from a running one."""
        group.started = True
        last = next(reversed(self.running), group)
        self.running[group] = None
        # Groups start rarely: sorting here spares every step from doing so.
        if group.rank < last.rank:
            self.running = dict.fromkeys(sorted(self.running, key=lambda group: group.rank))

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of the queues; its sequences' tables must be released or dropped."""
        if group in self.running:
            del self.running[group]
        else:
            self.waiting.remove(group)
        self._in_flight_prefixes.forget(group)
        if self.deferred is group:
            self._deferred = None

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        return [*(group for group in self.running if group.request is request), *self.waiting.groups_of(request)]

    def schedule(self) -> list[ScheduledChunk]:
        """The next batch's chunks, with writable slots reserved for each. Empty only if nothing can run."""
        for group in [group for group in self.running if group.num_shared_prefill_tokens]:
            self._end_shared_prefill(group)
        budget = self._max_num_batched_tokens
        decoding: list[SequenceGroup] = []
        prompts: list[SequenceGroup] = []
        for group in self.running:
            (decoding if group.num_pending == 1 else prompts).append(group)
        has_slots = self.blocks.reserve_next_slots(decoding)
        # Decoding is scheduled first, so that no prompt chunk can delay a stream.
        last_tokens = [ScheduledChunk(group, sequence, 1, True) for group in decoding for sequence in group.sequences]
        all_fit = has_slots and len(last_tokens) <= budget
        chunks = last_tokens if all_fit else self._schedule_some(decoding, has_slots, budget)
        self._schedule_prompts(chunks, prompts, budget - len(chunks))
        return chunks

    def reserve_decoding(self) -> bool:
        """Make the next slot of every decoding sequence writable; False, with nothing changed, if one must be preempted."""
        return self.blocks.reserve_next_slots([group for group in self.running if group.num_pending == 1])

    # -- decoding and preemption ---------------------------------------------------------------------------------

    def _chunks_of(self, group: SequenceGroup, budget: int) -> list[ScheduledChunk]:
        """As many of the group's pending tokens as the budget allows."""
        if len(group.sequences) == 1:
            (sequence,) = group.sequences
            pending = sequence.num_pending
            count = min(pending, budget)
            return [ScheduledChunk(group, sequence, count, count == pending)] if count else []
        if group.num_shared_prefill_tokens:
            first = group.sequences[0]
            count = min(group.num_shared_prefill_tokens - first.num_computed, budget)
            return [ScheduledChunk(group, first, count, False)] if count else []
        if group.num_pending == 1:
            return self._last_tokens_of(group, budget)
        planned = []
        for sequence in group.sequences:
            count = min(sequence.num_pending - 1, budget)
            if count:
                planned.append(ScheduledChunk(group, sequence, count, False))
                budget -= count
        return planned

    @staticmethod
    def _last_tokens_of(group: SequenceGroup, budget: int) -> list[ScheduledChunk]:
        """The last pending token of each sequence; of beams all at once or not at all."""
        if len(group.sequences) > budget:
            return []
        return [ScheduledChunk(group, sequence, 1, True) for sequence in group.sequences]

    def _schedule_some(self, decoding: list[SequenceGroup], has_slots: bool, budget: int) -> list[ScheduledChunk]:
        """The last tokens of those decoding groups that the budget and, without slots for all, the blocks suffice for."""
        chunks: list[ScheduledChunk] = []
        for group in decoding:
            planned = self._last_tokens_of(group, budget - len(chunks))
            # A group that is no longer running was preempted for one before it.
            if planned and (has_slots or (group in self.running and self._reserve_or_preempt(planned))):
                chunks += planned
        return chunks

    def _reserve_or_preempt(self, planned: list[ScheduledChunk]) -> bool:
        """Make the chunks' slots writable, preempting the lowest rank as needed; False: that was the group itself."""
        group = planned[0].group
        # Groups are scheduled in order of rank, and before all prompts: the lowest rank is never one that this step has
        # scheduled already. A prompt's blocks were all reserved when it was admitted.
        for chunk in planned:
            while not self.blocks.reserve(chunk.sequence, chunk.num_tokens):
                victim = next(reversed(self.running))
                self._preempt(victim)
                if victim is group:
                    return False
        return True

    def _end_shared_prefill(self, group: SequenceGroup) -> None:
        """Let the sequences of a group continue separately, once what they have in common is computed.

        If blocks run out, the group itself is preempted: the tokens of others may be in flight, and theirs must be known.
        """
        if group.sequences[0].num_computed < group.num_shared_prefill_tokens:
            return
        self.blocks.fork_prefilled(group)
        if not all(self.blocks.reserve(sequence, sequence.num_pending) for sequence in group.sequences):
            self._preempt(group)

    def _preempt(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            if sequence.table is not None:
                self.blocks.release(sequence)
            sequence.num_computed = 0
        group.num_shared_prefill_tokens = 0
        group.prompt = np.array(group.sequences[0].token_ids, dtype=np.int32)
        del self.running[group]
        self.waiting.add(group)
        self.num_preemptions += 1

    # -- prompts and admission -----------------------------------------------------------------------------------

    def _schedule_prompts(self, chunks: list[ScheduledChunk], prompts: list[SequenceGroup], budget: int) -> None:
        """Fill what decoding leaves of the step: with prompts in progress, by rank, then with waiting groups.

        The first prompt that is too long for what is left reserves half of it, shorter ones behind it use the other half,
        and what they leave is the long one's again::

            |  decoding  |  long prompt: at least half of the rest  |  short ones: up to half  |

        So a short prompt never waits for the end of a long one, which takes at most twice as long for that.
        """
        self._queue_looked_up = False
        self._growth = None
        long, reserved = None, 0
        for group in prompts:
            if group not in self.running:
                continue  # preempted for a decoding group
            # More urgent requests do not wait for the end of a prompt in progress.
            budget -= self._admit_waiting(chunks, budget, long is not None, group.request.priority)
            if group.num_pending <= budget:
                budget -= self._schedule_chunks(chunks, group, budget)
            elif long is None:
                long, reserved = group, budget - budget // 2
                budget -= reserved
        budget -= self._admit_waiting(chunks, budget, long is not None)
        if long is not None:
            self._schedule_chunks(chunks, long, budget + reserved)

    def _schedule_chunks(self, chunks: list[ScheduledChunk], group: SequenceGroup, budget: int) -> int:
        """Schedule as much of a prompt as the budget allows; returns the number of tokens."""
        planned = self._chunks_of(group, budget)
        chunks.extend(planned)
        return sum(chunk.num_tokens for chunk in planned)

    def _admit_waiting(
        self, chunks: list[ScheduledChunk], budget: int, whole_prompts: bool, before_priority: float = math.inf
    ) -> int:
        """Admit waiting groups and schedule their prompts while there is budget; returns the number of tokens.

        Args:
            whole_prompts: only prompts that fit into the budget as a whole.
            before_priority: only requests that are more urgent.
        """
        num_tokens = 0
        while num_tokens < budget and self.waiting and self.waiting.most_urgent < before_priority:
            group = self._next_to_admit()
            if group is None or group.request.priority >= before_priority:
                break
            if (whole_prompts and self.waiting.num_uncached(group) > budget - num_tokens) or not self._admit(group):
                break
            num_tokens += self._schedule_chunks(chunks, group, budget - num_tokens)
        return num_tokens

    def _next_to_admit(self) -> SequenceGroup | None:
        """The next group in order of admission, unless nothing has changed since it did not fit."""
        if self._deferred is not None:
            group = self._deferred.group
            if not self.waiting.is_preceded(group):
                return group if self._may_fit_now(self._deferred) else None
            self._deferred = None
        if self._num_admissible_seqs < 1:
            return None
        candidates = self.waiting.candidates(look_up=not self._queue_looked_up)
        self._queue_looked_up = True
        return next(
            (group for group in candidates if not self._in_flight_prefixes.should_wait(group, self.running)), None
        )

    def _decode_growth(self) -> DecodeGrowth:
        """That of the running groups: gone through once per step that admits, not once per group that it admits."""
        if self._growth is None:
            self._growth = DecodeGrowth(self.running, self._cache.block_size, self._max_num_batched_tokens)
        return self._growth

    @property
    def _num_admissible_seqs(self) -> int:
        """`num_free_seqs`, while this step admits."""
        return self._max_num_seqs - self._decode_growth().num_seqs

    @property
    def _occupancy(self) -> tuple[int, int]:
        """Running groups, and those of them whose prompts are in progress: what decode growth mostly depends on."""
        return len(self.running), sum(group.num_pending > 1 for group in self.running)

    def _may_fit_now(self, deferred: _DeferredAdmission) -> bool:
        if deferred.group.num_seqs > self._num_admissible_seqs:
            return False
        return self._cache.num_available_blocks >= deferred.num_blocks or self._occupancy != deferred.occupancy

    def _admit(self, group: SequenceGroup) -> bool:
        """Open the group's tables and start it; False: it does not fit beside the running groups."""
        if group.num_seqs > self._num_admissible_seqs:
            self._deferred = _DeferredAdmission(group, 0, self._occupancy)
            return False
        available = self._cache.num_available_blocks
        try:
            self._open_tables(group)
            self._check_decode_growth(group)
        except OutOfBlocks as error:
            self._growth = None
            for sequence in group.sequences:
                self.blocks.drop(sequence)
                sequence.num_computed = 0
            group.num_shared_prefill_tokens = 0
            missing = error.needed - error.free - error.evictable
            self._deferred = _DeferredAdmission(group, available + missing, self._occupancy)
            return False
        self._deferred = None
        self._in_flight_prefixes.forget(group)
        self.waiting.admit(group)
        self.start(group)
        if group.request.num_cached_tokens is None:
            group.request.num_cached_tokens = group.sequences[0].num_computed
        return True

    def _open_tables(self, group: SequenceGroup) -> None:
        """Open a table for each sequence and reserve its slots, or only the first's if the group has to prefill it.

        Raises:
            OutOfBlocks: some tables may be open then.
        """
        cache, request = self._cache, group.request
        # Reused tokens have no logits, so prompt log-probabilities need the whole prompt computed.
        read = request.read_cache and not (request.wants_prompt_logprobs and request.metrics.first_token_time is None)
        num_common = group.num_common_tokens
        for index, sequence in enumerate(group.sequences):
            tokens = group.prompt if index == 0 else np.array(sequence.token_ids, dtype=np.int32)
            # A request's lower priority is more urgent; the cache keeps a higher priority longer.
            sequence.table = cache.open(
                tokens, request.namespace, read=read, write=request.write_cache, priority=-request.priority
            )
            sequence.num_computed = sequence.table.num_tokens
            if sequence.num_computed < num_common:
                # Evicted meanwhile. If each sequence computed it again, blocks might not suffice.
                group.num_shared_prefill_tokens = num_common
                cache.reserve(sequence.table, num_common)
                return
            cache.reserve(sequence.table, len(sequence.token_ids))

    def _check_decode_growth(self, group: SequenceGroup) -> None:
        """Raise OutOfBlocks unless the running groups and ``group`` can continue together, see `admission_control`."""
        growth = self._decode_growth()
        growth.add(group)
        if not self.running:
            return
        cache = self._cache
        needed = growth.num_blocks
        if cache.num_available_blocks < needed:
            raise OutOfBlocks(needed, cache.num_free_blocks, cache.num_evictable_blocks)
