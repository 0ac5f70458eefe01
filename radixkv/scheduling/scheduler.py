"""Which tokens are computed in the next step, and which sequences are preempted when blocks run out.

Continuous batching with chunked prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2024): every step takes one token
of each decoding sequence first, then fills the token budget with prompts, in chunks. So a stream gets a token every step,
and no prompt, however long, delays it by more than the time of one chunk; nor does a long prompt delay short ones by more.

`FairShares` says which tenant is served next, and the `WaitingQueue` which of its groups, except that a group whose prefix
is in flight is skipped (`InFlightPrefixes`). One that does not fit is passed by smaller ones, as often as a group can be
overtaken; then they wait for it, or it could starve.

When blocks run out, the running group of the lowest rank (least urgent, then youngest) of the tenant that has most is
preempted: its blocks stay in the tree, where they may be evicted, and it is queued before all new groups of its tenant; what
survives is reused when it resumes. How seldom that happens is bounded by `admission_control`. Admission preempts only between
tenants, for one that has less than its part: no request, however urgent, takes anything from what its own tenant is running.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from dataclasses import dataclass

import numpy as np

from radixkv.cache import OutOfBlocks, PrefixCache
from radixkv.scheduling.admission_control import DecodeGrowth
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.sequence_blocks import SequenceBlocks
from radixkv.scheduling.tenant_usage import TenantUsage
from radixkv.scheduling.waiting_queue import WaitingQueue


@dataclass(frozen=True, slots=True)
class _DeferredAdmission:
    """A group did not fit.

    Trying again is useless before ``num_blocks`` are available or the ``occupancy`` has changed.
    """

    num_blocks: int
    occupancy: tuple[int, int]


class Scheduler:
    """Owns the waiting and running groups, and through `blocks` their block tables.

    Args:
        cache: whose blocks the sequences use.
        max_num_batched_tokens: tokens per step at most.
        max_num_seqs: concurrent sequences at most.
        waiting: the queue to use; by default one with the usual bounds.
        shares: of the tenants; by default equal ones.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        waiting: WaitingQueue | None = None,
        shares: FairShares | None = None,
    ) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_seqs = max_num_seqs
        self.blocks = SequenceBlocks(cache)
        self.waiting = WaitingQueue(cache) if waiting is None else waiting
        self.shares = FairShares() if shares is None else shares
        # In order of rank. A dict for membership and removal in constant time.
        self.running: dict[SequenceGroup, None] = {}
        self.num_preemptions = 0
        self._in_flight_prefixes = InFlightPrefixes(cache)
        self._deferred: dict[SequenceGroup, _DeferredAdmission] = {}
        self._looked_up: set[str] = set()  # the tenants whose queues were looked up in this step
        self._growth: DecodeGrowth | None = None  # of the running groups, while this step admits
        self._admitting: TenantUsage | None = None  # likewise
        self._arrivals = itertools.count()

    @property
    def num_free_seqs(self) -> int:
        """How many more sequences may run concurrently."""
        return self._max_num_seqs - sum(group.num_seqs for group in self.running)

    @property
    def deferred(self) -> SequenceGroup | None:
        """A waiting group that did not fit when last tried, of several the one that was tried first."""
        return next(iter(self._deferred), None)

    def add(self, group: SequenceGroup) -> None:
        """Queue the group of a new request."""
        group.request.arrival = next(self._arrivals)
        tenant = group.request.tenant
        if tenant not in self.waiting.tenants:
            self.shares.lift(tenant, self.waiting.tenants, {group.request.tenant for group in self.running})
        self.waiting.add(group)

    def start(self, group: SequenceGroup) -> None:
        """Run a group that has its block tables: one that was admitted, or forked from a running one."""
        group.started = True
        group.num_computed_at_start = group.sequences[0].num_computed
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
        self._deferred.pop(group, None)
        if not self.running and not self.waiting:
            self.shares.reset()

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        return [*(group for group in self.running if group.request is request), *self.waiting.groups_of(request)]

    def schedule(self) -> list[ScheduledChunk]:
        """The next batch's chunks, with writable slots reserved for each. Empty only if nothing can run."""
        for group in [group for group in self.running if group.num_shared_prefill_tokens]:
            self._end_shared_prefill(group)
        giving_way = self._groups_to_make_room()
        # Where blocks became fewer since `reserve_decoding`, their tokens may be in flight: then they give way a step later.
        if not any(sequence.num_placeholders for group in giving_way for sequence in group.sequences):
            for group in giving_way:
                self._preempt(group)
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
        generated = Counter([chunk.group.request.tenant for chunk in chunks if chunk.completes])
        for tenant, num_tokens in generated.items():
            self.shares.charge(tenant, generated=num_tokens)
        return chunks

    def reserve_decoding(self) -> bool:
        """Make the next slot of every decoding sequence writable; False, with nothing changed, if one must be preempted."""
        if self._groups_to_make_room():
            return False
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
        if has_slots:
            for group in decoding:
                chunks += self._last_tokens_of(group, budget - len(chunks))
            return chunks
        # In this order, who gives way is never one that this step has scheduled already. A prompt's blocks were all
        # reserved when it was admitted.
        running = self.shares.keep_order(self.running, lambda group: group.num_blocks)
        waits_for_slots = set(decoding)
        for group in list(running):
            planned = self._last_tokens_of(group, budget - len(chunks)) if group in waits_for_slots else []
            # A group that is no longer running was preempted for one before it.
            if planned and group in self.running and self._reserve_or_preempt(planned, running):
                chunks += planned
        return chunks

    def _reserve_or_preempt(self, planned: list[ScheduledChunk], running: list[SequenceGroup]) -> bool:
        """Make the chunks' slots writable, preempting from the end of ``running``; False: that was the group itself."""
        group = planned[0].group
        for chunk in planned:
            while not self.blocks.reserve(chunk.sequence, chunk.num_tokens):
                victim = running.pop()
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

    def _groups_to_make_room(self) -> list[SequenceGroup]:
        """The groups to preempt so that tenants that wait get their part; see `fair_shares`."""
        if not self.waiting or not self.running:
            return []
        # The usual case, in every step.
        tenants = self.waiting.tenants
        if len(tenants) == 1 and all(group.request.tenant in tenants for group in self.running):
            return []
        usage = self._usage()
        victims: list[SequenceGroup] = []
        for tenant in self._in_turn(usage):
            for group in self.waiting.groups(tenant):
                if not usage.has_claim(group) or self._in_flight_prefixes.should_wait(group, self.running):
                    break
                if group in self._deferred and not self._may_fit_now(self._deferred[group]):
                    return victims or usage.victims_for_blocks(group)
                missing = group.num_seqs - (self._max_num_seqs - usage.num_seqs.total())
                if missing > 0:
                    giving_way = usage.victims_for_seqs(group, missing)
                    if not giving_way:
                        return victims
                    usage.remove(giving_way)
                    victims += giving_way
                usage.add(group)
        return victims

    def _preempt(self, group: SequenceGroup) -> None:
        # A prompt was charged as a whole when it was admitted.
        self.shares.charge(group.request.tenant, computed=-max(0, group.num_pending - 1))
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
        """Fill what decoding leaves of the step: with prompts in progress, in turn, then with waiting groups.

        The first prompt that is too long for what is left reserves half of it, shorter ones behind it use the other half,
        and what they leave is the long one's again::

            |  decoding  |  long prompt: at least half of the rest  |  short ones: up to half  |

        So a short prompt never waits for the end of a long one, which takes at most twice as long for that.
        """
        self._looked_up.clear()
        self._growth = self._admitting = None
        long, reserved = None, 0
        prompts.sort(key=lambda group: self.shares.counter(group.request.tenant))  # equal ones stay in order of rank
        for group in prompts:
            if group not in self.running:
                continue  # preempted for a decoding group
            # More urgent requests do not wait for the end of a prompt in progress, nor do tenants that were served less.
            budget -= self._admit_waiting(chunks, budget, long is not None, group.request)
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
        self, chunks: list[ScheduledChunk], budget: int, whole_prompts: bool, before: Request | None = None
    ) -> int:
        """Admit waiting groups and schedule their prompts while there is budget; returns the number of tokens.

        Args:
            whole_prompts: only prompts that fit into the budget as a whole.
            before: only what comes before this request: its tenant's more urgent ones, and tenants that were served less.
        """
        num_tokens = 0
        while num_tokens < budget and self.waiting:
            group = self._admit_next(budget - num_tokens if whole_prompts else None, before)
            if group is None:
                break
            num_tokens += self._schedule_chunks(chunks, group, budget - num_tokens)
        return num_tokens

    def _admit_next(self, max_tokens: int | None, before: Request | None) -> SequenceGroup | None:
        """Admit the next group that fits, in turn of the tenants; None: there is none.

        Args:
            max_tokens: of its prompt; None: any number.
            before: as in `_admit_waiting`.
        """
        if self._num_admissible_seqs < 1:
            return None
        usage = self._current_usage()
        tenants = self._tenants_before(before, usage)
        passed: list[SequenceGroup] = []
        for tenant in tenants:
            did_not_fit: list[SequenceGroup] = []
            candidates = self.waiting.candidates(tenant, look_up=tenant not in self._looked_up)
            self._looked_up.add(tenant)
            for group in candidates:
                if before is not None and tenant == before.tenant and group.request.priority >= before.priority:
                    break
                if usage.exceeds_limit(group):
                    break
                if self._in_flight_prefixes.should_wait(group, self.running):
                    continue
                if max_tokens is not None and self.waiting.num_uncached(group) > max_tokens:
                    break
                if self._admit(group):
                    usage.add(group)
                    for other in passed:
                        self.waiting.pass_over(other)
                    return group
                did_not_fit.append(group)
                if group.started:
                    break  # it has begun its answer, which should not stall for a new one's
            if any(usage.may_hold_up_others(group) for group in did_not_fit if not self.waiting.may_be_passed(group)):
                return None
            passed += did_not_fit[:1]
        return None

    def _tenants_before(self, request: Request | None, usage: TenantUsage) -> list[str]:
        """The tenants, in turn, whose waiting groups may come before a request whose prompt is in progress."""
        tenants = self._in_turn(usage)
        if request is None:
            return tenants
        counter = self.shares.counter(request.tenant)
        return [
            tenant
            for tenant in tenants
            if (
                self.waiting.first(tenant).request.priority < request.priority
                if tenant == request.tenant
                else self.shares.counter(tenant) < counter or usage.has_claim(self.waiting.first(tenant))
            )
        ]

    def _in_turn(self, usage: TenantUsage) -> list[str]:
        """The tenants that wait: first those that have less than their part, then by what they were served."""
        tenants = self.shares.in_turn(self.waiting.tenants)
        if len(tenants) > 1:
            tenants.sort(key=lambda tenant: not usage.has_claim(self.waiting.first(tenant)))
        return tenants

    def _current_usage(self) -> TenantUsage:
        """Kept up while this step admits, like `_decode_growth`."""
        if self._admitting is None:
            self._admitting = self._usage()
        return self._admitting

    def _usage(self) -> TenantUsage:
        cache = self._cache
        return TenantUsage(
            self.shares,
            self.running,
            self.waiting.tenants,
            self._max_num_seqs,
            cache.num_blocks,
            cache.block_size,
            # What was used last is evicted last.
            cached_stays=2 * cache.num_available_blocks >= cache.num_blocks,
            burst=self._max_num_batched_tokens,
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
        return self._cache.num_available_blocks >= deferred.num_blocks or self._occupancy != deferred.occupancy

    def _admit(self, group: SequenceGroup) -> bool:
        """Open the group's tables and start it; False: it does not fit beside the running groups."""
        deferred = self._deferred.get(group)
        if group.num_seqs > self._num_admissible_seqs or (deferred is not None and not self._may_fit_now(deferred)):
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
            self._deferred[group] = _DeferredAdmission(available + missing, self._occupancy)
            return False
        self._deferred.pop(group, None)
        self._in_flight_prefixes.forget(group)
        self.waiting.admit(group)
        self.start(group)
        num_reused = group.num_computed_at_start
        self.shares.charge(group.request.tenant, computed=group.num_pending - 1, reused=num_reused)
        if group.request.num_cached_tokens is None:
            group.request.num_cached_tokens = group.sequences[0].num_computed
            group.request.metrics.scheduled_time = time.monotonic()
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
