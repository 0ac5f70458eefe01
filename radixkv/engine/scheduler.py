"""Which tokens go into the next batch, and whose blocks give way when there are none left.

Continuous batching with chunked prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2024): every step takes one token
of each decoding sequence first, then fills the token budget with prompts, in chunks, in order of arrival.

A waiting request whose prefix a running one is just computing is left waiting until that is published, so that sixteen
equal prompts that arrive together are computed once. When blocks run out, the youngest running group is preempted: its
blocks stay in the tree, where they may be evicted, and it waits in front; what survives is found again when it resumes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from radixkv.cache import OutOfBlocks, PrefixCache
from radixkv.engine.request import Request, Sequence, SequenceGroup
from radixkv.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """The next ``num_tokens`` pending tokens of ``sequence`` are computed in this step."""

    group: SequenceGroup
    sequence: Sequence
    num_tokens: int


@dataclass(frozen=True, slots=True)
class _AwaitedPrefix:
    """A waiting group stays so until ``owner`` has computed ``num_tokens``, or no longer runs."""

    owner: SequenceGroup
    num_tokens: int


class Scheduler:
    """Owns the queues, and every open block table.

    Args:
        cache: whose blocks the sequences take.
        max_num_batched_tokens: tokens a step at most.
        max_num_seqs: sequences that run side by side at most.
    """

    def __init__(self, cache: PrefixCache, max_num_batched_tokens: int, max_num_seqs: int) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.waiting: deque[SequenceGroup] = deque()
        # Oldest first; a dict for membership and removal in constant time.
        self.running: dict[SequenceGroup, None] = {}
        self.num_preemptions = 0
        self._awaited: dict[SequenceGroup, _AwaitedPrefix] = {}
        # How many blocks were available when the group was last refused: until there are more, it is not tried again.
        self._refused_at: dict[SequenceGroup, int] = {}

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def add(self, group: SequenceGroup) -> None:
        self.waiting.append(group)

    def schedule(self) -> list[ScheduledChunk]:
        """The next step's chunks, with writable blocks reserved for each. Empty only when nothing can run."""
        chunks: list[ScheduledChunk] = []
        budget = self._max_num_batched_tokens
        has_room = self._reserve_decoding()
        # Decoding goes first, so that no prompt chunk can delay a stream.
        for group in sorted(self.running, key=lambda group: group.num_pending > 1):
            if group not in self.running:
                continue  # preempted for one before it
            planned = self._plan(group, budget)
            if planned and ((has_room and group.num_pending == 1) or self._reserve_or_preempt(planned)):
                chunks.extend(planned)
                budget -= sum(chunk.num_tokens for chunk in planned)
        for group in list(self.waiting):
            if budget < 1:
                break
            if self._num_running_slots() + self._slots(group) > self._max_num_seqs:
                break
            if self._is_refused(group):
                break
            if self._awaits_prefix(group):
                continue
            if not self._admit(group):
                break
            planned = self._plan(group, budget)
            chunks.extend(planned)
            budget -= sum(chunk.num_tokens for chunk in planned)
        return chunks

    def commit(self, sequence: Sequence, num_tokens: int) -> None:
        """Note that the next ``num_tokens`` were computed; whole blocks become known to everybody."""
        sequence.num_computed += num_tokens
        # Between block borders nothing could be published: recording waits, so that decoding costs nothing here.
        if num_tokens > 1 or sequence.num_computed % self._cache.block_size == 0:
            self.record(sequence)

    def record(self, sequence: Sequence) -> None:
        """Tell the table of all computed tokens, as a fork and the end of a sequence need."""
        table = sequence.table
        assert table is not None
        if table.num_tokens < sequence.num_computed:
            self._cache.append(table, sequence.token_ids[table.num_tokens : sequence.num_computed])

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
        self._awaited.pop(group, None)
        self._refused_at.pop(group, None)

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        return [group for group in (*self.running, *self.waiting) if group.request is request]

    def _plan(self, group: SequenceGroup, budget: int) -> list[ScheduledChunk]:
        """As many of the group's pending tokens as the budget allows; beams choose together, so all or none last ones."""
        if len(group.sequences) == 1:
            (sequence,) = group.sequences
            count = min(sequence.num_pending, budget)
            return [ScheduledChunk(group, sequence, count)] if count else []
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

    def _reserve_decoding(self) -> bool:
        """Make the next slot of every decoding sequence writable, in one call; False, and nothing, if not all can be."""
        decoding = [s for group in self.running if group.num_pending == 1 for s in group.sequences]
        tables = [sequence.table for sequence in decoding if sequence.table is not None]
        try:
            self._cache.reserve_many(tables, [sequence.num_computed + 1 for sequence in decoding])
        except OutOfBlocks:
            return False
        return True

    def _reserve_or_preempt(self, planned: list[ScheduledChunk]) -> bool:
        """Make the chunks' slots writable, preempting the youngest groups as needed; False: the group itself gave way."""
        group = planned[0].group
        # Only decoding groups get here with blocks to take, oldest first, for a prompt's were all reserved when it was
        # admitted. So the youngest group is never one that this step has planned already.
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

    def _preempt(self, group: SequenceGroup) -> None:
        for sequence in group.sequences:
            self.release(sequence)
            sequence.num_computed = 0
        del self.running[group]
        self.waiting.appendleft(group)
        self.num_preemptions += 1

    def _admit(self, group: SequenceGroup) -> bool:
        """Open the group's tables and start it, if its blocks, and one more for each running sequence, can be had."""
        cache = self._cache
        request = group.request
        wants_prompt_logprobs = (
            isinstance(request.params, SamplingParams) and request.params.prompt_logprobs is not None
        )
        # Reused tokens have no logits, so prompt log-probabilities need the whole prompt computed.
        read = request.read_cache and not (wants_prompt_logprobs and request.metrics.first_token_time is None)
        opened: list[Sequence] = []
        try:
            for sequence in group.sequences:
                tokens = np.array(sequence.token_ids, dtype=np.int32)
                sequence.table = cache.open(tokens, request.namespace, read=read, write=request.write_cache)
                sequence.num_computed = sequence.table.num_tokens
                opened.append(sequence)
                cache.reserve(sequence.table, len(sequence.token_ids))
            spare = sum(len(running.sequences) for running in self.running)
            if cache.num_available_blocks < spare:
                raise OutOfBlocks(needed=spare, free=cache.num_free_blocks, evictable=cache.num_evictable_blocks)
        except OutOfBlocks:
            for sequence in opened:
                self.drop(sequence)
                sequence.num_computed = 0
            self._refused_at[group] = cache.num_available_blocks
            return False
        self._refused_at.pop(group, None)
        self.waiting.remove(group)
        self.running[group] = None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = group.sequences[0].num_computed
        return True

    def _is_refused(self, group: SequenceGroup) -> bool:
        refused_at = self._refused_at.get(group)
        return refused_at is not None and bool(self.running) and self._cache.num_available_blocks <= refused_at

    def _awaits_prefix(self, group: SequenceGroup) -> bool:
        """Whether a running prompt will soon publish at least a block more of the group's prompt than is known now."""
        awaited = self._awaited.get(group)
        if awaited is not None:
            owner = awaited.owner
            if owner in self.running and owner.sequences[0].num_computed < awaited.num_tokens:
                return True
            del self._awaited[group]
        request = group.request
        if not request.read_cache or len(group.sequences) > 1:
            return False
        tokens = group.sequences[0].token_ids
        for owner, num_common in self._prefixes_in_progress(request, tokens):
            whole = num_common // self._cache.block_size * self._cache.block_size
            known = max(owner.sequences[0].num_computed, self._cache.match(tokens, request.namespace))
            if whole - known >= self._cache.block_size:
                self._awaited[group] = _AwaitedPrefix(owner, whole)
                return True
        return False

    def _prefixes_in_progress(self, request: Request, tokens: list[int]) -> Iterator[tuple[SequenceGroup, int]]:
        for owner in self.running:
            if owner.num_pending > 1 and owner.request.write_cache and owner.request.namespace == request.namespace:
                theirs = owner.sequences[0].token_ids
                shorter = min(len(tokens) - 1, len(theirs))
                differs = np.array(tokens[:shorter]) != np.array(theirs[:shorter])
                yield owner, int(differs.argmax()) if differs.any() else shorter

    def _num_running_slots(self) -> int:
        return sum(self._slots(group) for group in self.running)

    @staticmethod
    def _slots(group: SequenceGroup) -> int:
        """Sequences that the group is or will soon be: before its first token, a request's only group stands for all."""
        return group.request.num_slots if len(group.request.sequences) == 1 else len(group.sequences)
