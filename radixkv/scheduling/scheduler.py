"""Which tokens go into the next batch, and whose blocks give way when there are none left.

Continuous batching with chunked prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2024): every step takes one token
of each decoding sequence first, then fills the token budget with prompts, in chunks. So a stream gets a token every step,
and no prompt, however long, holds it up by more than the time of one chunk; nor does it hold up short prompts by more.

Who is let in next is the `WaitingQueue`'s to say, but for those who wait for a prefix in progress (`AwaitedPrefixes`).
The first who may be let in and does not fit is waited for: smaller ones do not slip past it, or it would wait for ever.
Nobody is preempted to let another in, however urgent; priorities decide who waits and, when blocks run out, who gives way.

When blocks run out, the least urgent and youngest running group is preempted: its blocks stay in the tree, where they may
be evicted, and it waits before all new ones; what survives is found again when it resumes. How seldom that happens,
`headroom` says.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from radixkv.cache import OutOfBlocks, PrefixCache
from radixkv.sampling_params import SamplingParams
from radixkv.scheduling.admission_control import blocks_to_go_on
from radixkv.scheduling.in_flight_prefixes import AwaitedPrefixes
from radixkv.scheduling.request import Request, Sequence, SequenceGroup
from radixkv.scheduling.waiting_queue import WaitingQueue


class ScheduledChunk(NamedTuple):
    """The next ``num_tokens`` pending tokens of ``sequence`` are computed in this step."""

    group: SequenceGroup
    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _Refusal:
    """It is ``group``'s turn, but it did not fit.

    There is no use in trying again before ``num_blocks`` are available, or something else than ``occupancy`` runs.
    """

    group: SequenceGroup
    num_blocks: int
    occupancy: tuple[int, int]


class Scheduler:
    """Owns the queues, and every open block table.

    Args:
        cache: whose blocks the sequences take.
        max_num_batched_tokens: tokens a step at most.
        max_num_seqs: sequences that run side by side at most.
        waiting: the line to use; by default one with the usual bounds.
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
        self.waiting = WaitingQueue(cache) if waiting is None else waiting
        # By rank: the most urgent and oldest first. A dict for membership and removal in constant time.
        self.running: dict[SequenceGroup, None] = {}
        self.num_preemptions = 0
        self._awaited = AwaitedPrefixes(cache)
        self._refusal: _Refusal | None = None
        self._looked_up = False  # in this step
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_free_slots(self) -> int:
        """How many more sequences may run side by side with those that do."""
        return self._max_num_seqs - sum(group.num_slots for group in self.running)

    @property
    def refused(self) -> SequenceGroup | None:
        """The waiting group whose turn it is, and which did not fit when it was last tried."""
        return None if self._refusal is None else self._refusal.group

    def add(self, group: SequenceGroup) -> None:
        """A new request's group waits from now on."""
        group.request.arrival = next(self._arrivals)
        self.waiting.add(group)

    def start(self, group: SequenceGroup) -> None:
        """A group that has its tables runs from now on: one that was let in, or a fork of a running one."""
        group.started = True
        self.running[group] = None
        # Rare against steps: sorting here spares every step from doing so.
        self.running = dict.fromkeys(sorted(self.running, key=lambda group: group.rank))

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, with writable blocks reserved for each. Empty only when nothing can run."""
        for group in [group for group in self.running if group.num_together]:
            self._part(group)
        chunks: list[ScheduledChunk] = []
        budget = self._max_num_batched_tokens
        decoding: list[SequenceGroup] = []
        prompts: list[SequenceGroup] = []
        for group in self.running:
            (decoding if group.num_pending == 1 else prompts).append(group)
        has_room = self._reserve_next_slots(decoding)
        # Decoding goes first, so that no prompt chunk can delay a stream.
        for group in decoding:
            if group not in self.running:
                continue  # preempted for one before it
            planned = self._plan(group, budget)
            if planned and (has_room or self._reserve_or_preempt(planned)):
                chunks.extend(planned)
                budget -= len(planned)
        self._schedule_prompts(chunks, prompts, budget)
        return chunks

    def reserve_decoding(self) -> bool:
        """Make the next slot of every decoding sequence writable; False, and nothing, if one would have to give way."""
        return self._reserve_next_slots([group for group in self.running if group.num_pending == 1])

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the next ``num_tokens`` were computed; whole blocks become known to everybody."""
        sequence.num_computed += num_tokens
        if num_tokens > 1:
            self.record(sequence)
        else:
            self.record_at_border(sequence)

    def record_at_border(self, sequence: Sequence) -> None:
        """Tell the table, if a block has just become whole: until then nothing could be published, and decoding is cheap."""
        if min(sequence.num_computed, sequence.num_known) % self._cache.block_size == 0:
            self.record(sequence)

    def record(self, sequence: Sequence) -> None:
        """Tell the table of all computed tokens that are known, as a fork and the end of a sequence need."""
        table = sequence.table
        assert table is not None
        stop = min(sequence.num_computed, sequence.num_known)
        if table.num_tokens < stop:
            self._cache.append(table, sequence.token_ids[table.num_tokens : stop])

    def fork(self, sequence: Sequence, num_children: int) -> list[Sequence]:
        """Continue a sequence in ``num_children`` more ways; blocks are shared until their owners part."""
        assert sequence.table is not None
        self.record(sequence)
        return [
            Sequence(sequence.request, sequence.index, list(sequence.token_ids), table, sequence.num_computed)
            for table in self._cache.fork(sequence.table, num_children)
        ]

    def release(self, sequence: Sequence) -> None:
        """A sequence has ended: all of it, its partly filled last block included, stays in the tree until evicted."""
        self.record(sequence)
        assert sequence.table is not None
        self._cache.close(sequence.table)
        sequence.table = None

    def drop(self, sequence: Sequence) -> None:
        """A sequence is given up: nothing more of it is kept than was already published."""
        if sequence.table is not None:
            self._cache.abort(sequence.table)
            sequence.table = None

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of the queues; its sequences' tables must be released or dropped."""
        if group in self.running:
            del self.running[group]
        else:
            self.waiting.remove(group)
        self._awaited.forget(group)
        if self.refused is group:
            self._refusal = None

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        return [*(group for group in self.running if group.request is request), *self.waiting.groups_of(request)]

    def _plan(self, group: SequenceGroup, budget: int) -> list[ScheduledChunk]:
        """As many of the group's pending tokens as the budget allows; beams choose together, so all or none last ones."""
        if len(group.sequences) == 1:
            (sequence,) = group.sequences
            count = min(sequence.num_pending, budget)
            return [ScheduledChunk(group, sequence, count)] if count else []
        if group.num_together:
            first = group.sequences[0]
            count = min(group.num_together - first.num_computed, budget)
            return [ScheduledChunk(group, first, count)] if count else []
        if group.num_pending == 1:
            if len(group.sequences) > budget:
                return []
            return [ScheduledChunk(group, sequence, 1) for sequence in group.sequences]
        planned = []
        for sequence in group.sequences:
            count = min(sequence.num_pending - 1, budget)
            if count:
                planned.append(ScheduledChunk(group, sequence, count))
                budget -= count
        return planned

    def _reserve_next_slots(self, groups: list[SequenceGroup]) -> bool:
        """Make the groups' next slots writable, in one call; False, and nothing, if not all can be."""
        sequences = [sequence for group in groups for sequence in group.sequences]
        tables = [sequence.table for sequence in sequences if sequence.table is not None]
        try:
            self._cache.reserve_many(tables, [sequence.num_computed + 1 for sequence in sequences])
        except OutOfBlocks:
            return False
        return True

    def _reserve_or_preempt(self, planned: list[ScheduledChunk]) -> bool:
        """Make the chunks' slots writable, preempting the last by rank as needed; False: the group itself gave way."""
        group = planned[0].group
        # Groups get here in the order of their ranks, and before all prompts: the last by rank is never one that this step
        # has planned already. A prompt's blocks were all reserved when it was admitted.
        for chunk in planned:
            while not self._reserve(chunk.sequence, chunk.num_tokens):
                victim = next(reversed(self.running))
                self._preempt(victim)
                if victim is group:
                    return False
        return True

    def _reserve(self, sequence: Sequence, num_tokens: int) -> bool:
        assert sequence.table is not None
        try:
            self._cache.reserve(sequence.table, sequence.num_computed + num_tokens)
        except OutOfBlocks:
            return False
        return True

    def _part(self, group: SequenceGroup) -> None:
        """Let each sequence of a group go on by itself, once what they have in common is computed.

        If there is no room for them the group itself gives way: others' tokens may be unknown, and they must not.
        """
        first, *others = group.sequences
        if first.num_computed < group.num_together:
            return
        self.record(first)
        assert first.table is not None
        for sequence, table in zip(others, self._cache.fork(first.table, len(others)), strict=True):
            sequence.table, sequence.num_computed = table, first.num_computed
        group.num_together = 0
        if not all(self._reserve(sequence, sequence.num_pending) for sequence in group.sequences):
            self._preempt(group)

    def _preempt(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            if sequence.table is not None:
                self.release(sequence)
            sequence.num_computed = 0
        group.num_together = 0
        group.prompt = np.array(group.sequences[0].token_ids, dtype=np.int32)
        del self.running[group]
        self.waiting.add(group)
        self.num_preemptions += 1

    def _schedule_prompts(self, chunks: list[ScheduledChunk], prompts: list[SequenceGroup], budget: int) -> None:
        """Fill what decoding leaves of the step: with prompts in progress, by rank, then with those who wait.

        The first that is too long for what is left leaves half of it to shorter ones behind it, and takes what they leave::

            |  decoding  |  long prompt: at least half of the rest  |  short ones: up to half  |

        So nobody with a short prompt waits for the end of a long one, which takes at most twice as long for it.
        """
        self._looked_up = False
        long, kept = None, 0
        for group in prompts:
            if group not in self.running:
                continue  # preempted for one that decodes
            # Nor does who is more urgent than a prompt in progress wait for its end.
            budget -= self._let_in(chunks, budget, long is not None, group.request.priority)
            if group.num_pending <= budget:
                budget -= self._take(chunks, group, budget)
            elif long is None:
                long, kept = group, budget - budget // 2
                budget -= kept
        budget -= self._let_in(chunks, budget, long is not None)
        if long is not None:
            self._take(chunks, long, budget + kept)

    def _take(self, chunks: list[ScheduledChunk], group: SequenceGroup, budget: int) -> int:
        """Plan as much of a prompt as there is budget for; returns the tokens planned."""
        planned = self._plan(group, budget)
        chunks.extend(planned)
        return sum(chunk.num_tokens for chunk in planned)

    def _let_in(self, chunks: list[ScheduledChunk], budget: int, whole: bool, before_priority: float = math.inf) -> int:
        """Admit who waits while there is budget; returns the tokens planned.

        Args:
            whole: only those whose prompts then fit into the budget as a whole.
            before_priority: only those more urgent.
        """
        num_tokens = 0
        while num_tokens < budget and self.waiting and self.waiting.most_urgent < before_priority:
            group = self._next_waiting()
            if group is None or group.request.priority >= before_priority:
                break
            if (whole and self.waiting.num_uncached(group) > budget - num_tokens) or not self._admit(group):
                break
            num_tokens += self._take(chunks, group, budget - num_tokens)
        return num_tokens

    def _next_waiting(self) -> SequenceGroup | None:
        """Whose turn it is, if anything has come free for it since it was last tried."""
        if self._refusal is not None:
            group = self._refusal.group
            if not self.waiting.may_go_before(group):
                return group if self._may_fit_now(self._refusal) else None
            self._refusal = None
        if self.num_free_slots < 1:
            return None
        candidates = self.waiting.candidates(look_up=not self._looked_up)
        self._looked_up = True  # once a step is enough
        return next((group for group in candidates if not self._awaited.is_worth_waiting(group, self.running)), None)

    @property
    def _occupancy(self) -> tuple[int, int]:
        """Groups that run, and those of them whose prompts are in progress: what headroom mostly depends on."""
        return len(self.running), sum(group.num_pending > 1 for group in self.running)

    def _may_fit_now(self, refusal: _Refusal) -> bool:
        if refusal.group.num_slots > self.num_free_slots:
            return False
        return self._cache.num_available_blocks >= refusal.num_blocks or self._occupancy != refusal.occupancy

    def _admit(self, group: SequenceGroup) -> bool:
        """Open the group's tables and start it, if there is room for it besides those that run."""
        if group.num_slots > self.num_free_slots:
            self._refusal = _Refusal(group, 0, self._occupancy)
            return False
        cache = self._cache
        request = group.request
        wants_prompt_logprobs = (
            isinstance(request.params, SamplingParams) and request.params.prompt_logprobs is not None
        )
        # Reused tokens have no logits, so prompt log-probabilities need the whole prompt computed.
        read = request.read_cache and not (wants_prompt_logprobs and request.metrics.first_token_time is None)
        available = cache.num_available_blocks
        opened: list[Sequence] = []
        num_common = group.num_common_tokens
        try:
            for sequence in group.sequences:
                tokens = group.prompt if not opened else np.array(sequence.token_ids, dtype=np.int32)
                sequence.table = cache.open(tokens, request.namespace, read=read, write=request.write_cache)
                sequence.num_computed = sequence.table.num_tokens
                opened.append(sequence)
                if sequence.num_computed < num_common:
                    # Not cached any more. Each by itself would compute it, and might not find the blocks.
                    group.num_together = num_common
                    cache.reserve(sequence.table, num_common)
                    break
                cache.reserve(sequence.table, len(sequence.token_ids))
            self._require_headroom(group)
        except OutOfBlocks as error:
            for sequence in opened:
                self.drop(sequence)
                sequence.num_computed = 0
            group.num_together = 0
            missing = error.needed - error.free - error.evictable
            self._refusal = _Refusal(group, available + missing, self._occupancy)
            return False
        self._refusal = None
        self._awaited.forget(group)
        self.waiting.admit(group)
        self.start(group)
        if request.num_cached_tokens is None:
            request.num_cached_tokens = group.sequences[0].num_computed
        return True

    def _require_headroom(self, group: SequenceGroup) -> None:
        """Raise OutOfBlocks unless enough is left that those who run and ``group`` can go on side by side."""
        if not self.running:
            return
        cache = self._cache
        needed = blocks_to_go_on([*self.running, group], cache.block_size, self._max_num_batched_tokens)
        if cache.num_available_blocks < needed:
            raise OutOfBlocks(needed, cache.num_free_blocks, cache.num_evictable_blocks)
