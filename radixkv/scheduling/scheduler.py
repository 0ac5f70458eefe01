"""Which tokens are computed in the next step, and which sequences are preempted when blocks run out.

Continuous batching with chunked prefill (Orca, Yu et al. 2022; Sarathi, Agrawal et al. 2024): every step takes one token
of each decoding sequence first, then fills the token budget with prompts, in chunks. So a stream gets a token every step,
and no prompt, however long, delays it by more than the time of one chunk; nor does a long prompt delay short ones by more.

`FairShares` says which tenant is served next, and the `WaitingQueue` which of its groups, except that a group whose prefix
is in flight is skipped (`InFlightPrefixes`). A group that does not fit is overtaken by smaller ones, up to a limit; then they
wait for it, because otherwise it could starve.

When blocks run out, the tenant with the most blocks for its weight loses its last running group by rank (the least urgent,
then the youngest). The blocks of a preempted group stay in the tree, where they may be evicted; it is queued before its
tenant's new groups of the same priority, and reuses what survives of its blocks when it resumes. `decode_growth` bounds how
often that happens. Admission preempts only across tenants, for one below its share: no request, however urgent, preempts
running groups of its own tenant.
"""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from radixkv.cache import PrefixCache
from radixkv.scheduling.admission import Admission
from radixkv.scheduling.batch import ScheduledChunk
from radixkv.scheduling.branch_points import BranchPoints
from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.in_flight_prefixes import InFlightPrefixes
from radixkv.scheduling.logit_rows import bound_logit_rows
from radixkv.scheduling.prefix_loads import PrefixLoads
from radixkv.scheduling.prompt_shares import bound_prompts
from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.sequence_blocks import SequenceBlocks
from radixkv.scheduling.tenant_share import TenantShare
from radixkv.scheduling.waiting_queue import WaitingQueue


@dataclass(slots=True)
class _PromptPlan:
    """The prompt chunks of a step so far, and how many tokens are left for more."""

    budget: int
    chunks: list[ScheduledChunk] = field(default_factory=list)

    def add(self, chunks: list[ScheduledChunk]) -> None:
        self.chunks += chunks
        self.budget -= sum(chunk.num_tokens for chunk in chunks)


class Scheduler:
    """Owns the waiting and running groups, and through `blocks` their block tables; `admission` starts those that wait.

    Args:
        waiting: by default a queue with the usual bounds.
        loads: from tiers below the pool; None: there are none.
        max_prompt_logit_rows: rows of logits per step for the log-probabilities of prompts; None: any number.
    """

    def __init__(
        self,
        cache: PrefixCache,
        max_num_batched_tokens: int,
        max_num_seqs: int,
        waiting: WaitingQueue | None = None,
        loads: PrefixLoads | None = None,
        max_prompt_logit_rows: int | None = None,
    ) -> None:
        self._cache = cache
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_prompt_logit_rows = max_prompt_logit_rows
        self._branch_points = None if cache.splits_blocks else BranchPoints(cache)
        self.blocks = SequenceBlocks(cache, self._branch_points)
        self.waiting = WaitingQueue(cache) if waiting is None else waiting
        self.shares = FairShares()
        # In order of rank. A dict for membership and removal in constant time.
        self.running: dict[SequenceGroup, None] = {}
        self.num_preemptions = 0
        self._loads = loads
        self.admission = Admission(
            cache,
            max_num_batched_tokens,
            max_num_seqs,
            self.running,
            self.waiting,
            self.shares,
            self.blocks,
            InFlightPrefixes(cache, self._branch_points),
            loads,
        )
        self._arrivals = itertools.count()

    def set_tenants(self, tenants: Mapping[str, TenantShare]) -> None:
        """Set what each tenant may have, from the next step on."""
        self.shares.set_tenants(tenants)
        self._cache.limit_owners(
            {
                name: int(share.max_cached_share * self._cache.num_blocks)
                for name, share in tenants.items()
                if share.max_cached_share is not None
            }
        )

    def add(self, *groups: SequenceGroup) -> None:
        """Queue a new request's only group, or the groups of all samples of a resumed request."""
        request = groups[0].request
        request.arrival = next(self._arrivals)
        self.shares.lift(request.tenant, (group.request.tenant for group in self.running))
        for group in groups:
            self._queue(group)

    def start(self, group: SequenceGroup) -> None:
        """Run a group that has its block tables: it was admitted, or forked from a running one."""
        group.started = True
        group.num_computed_at_start = group.sequences[0].num_computed
        last = next(reversed(self.running), group)
        self.running[group] = None
        # Groups start rarely: sorting here spares every step from doing so.
        if group.rank < last.rank:
            in_order = sorted(self.running, key=lambda group: group.rank)
            self.running.clear()
            self.running.update(dict.fromkeys(in_order))

    def remove(self, group: SequenceGroup) -> None:
        """Take a group out of the queues; its sequences' tables must be closed or aborted."""
        if group in self.running:
            if group.sequences and group.num_pending > 1:  # ended before its prompt was computed
                self.shares.refund(group)
            del self.running[group]
        else:
            self.waiting.remove(group)
            self._note_waiting(group.request.tenant)
        self.admission.forget(group)
        if not self.running and not self.waiting:
            self.shares.reset()

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        return [*(group for group in self.running if group.request is request), *self.waiting.groups_of(request)]

    def schedule(self) -> list[ScheduledChunk]:
        """The next batch's chunks, with writable slots reserved for each.

        Empty if nothing can run, or groups must be preempted first while tokens are in flight: all must be on the host then.
        """
        for group in [group for group in self.running if group.num_shared_prefill_tokens]:
            self._end_shared_prefill(group)
        budget = self._max_num_batched_tokens
        decoding: list[SequenceGroup] = []
        prompts: list[SequenceGroup] = []
        for group in self.running:
            (decoding if group.num_pending == 1 else prompts).append(group)
        # Before room is made: what others are preempted for would not start if decoding groups took its blocks then.
        reserved = self.blocks.reserve_next_slots(decoding)
        victims = self.admission.groups_to_preempt()
        if victims and self._has_tokens_in_flight:
            return []
        for group in victims:
            self._preempt(group)
        if victims:
            decoding = [group for group in decoding if group in self.running]
        # Decoding is scheduled first, so that no prompt chunk can delay a stream.
        if reserved:
            chunks = self._last_tokens_within(decoding, budget)
        elif self._has_tokens_in_flight:
            return []
        else:
            chunks = self._last_tokens_with_preemption(decoding, budget)
        chunks += self._schedule_prompts(prompts, budget - len(chunks))
        self._charge_generated(chunks)
        return chunks

    def _charge_generated(self, chunks: list[ScheduledChunk]) -> None:
        """Charge tenants for the tokens that a step generates for them."""
        generated = Counter([chunk.group.request.tenant for chunk in chunks if chunk.completes])
        for group, _, _, completes in chunks:
            # The prompt of n samples or beams completes once, and each of them gets its first token.
            if completes and group.request.metrics.first_token_time is None:
                generated[group.request.tenant] += group.num_seqs - 1
        for tenant, num_tokens in generated.items():
            self.shares.charge_generated(tenant, num_tokens)

    # -- decoding and preemption ---------------------------------------------------------------------------------

    @property
    def _has_tokens_in_flight(self) -> bool:
        return any(sequence.num_placeholders for group in self.running for sequence in group.sequences)

    def _chunks_of(self, group: SequenceGroup, budget: int) -> list[ScheduledChunk]:
        """As many of the group's pending tokens as the budget allows."""
        if len(group.sequences) == 1:
            (sequence,) = group.sequences
            pending = sequence.num_pending
            count = min(pending, budget)
            return [ScheduledChunk(group, sequence, count, count == pending)] if count else []
        if group.num_shared_prefill_tokens:
            first = group.sequences[0]
            missing = group.num_shared_prefill_tokens - first.num_computed
            assert missing > 0, "what is common is computed, and not forked"
            count = min(missing, budget)
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
        """The last pending token of each sequence, for all sequences of the group or for none."""
        if len(group.sequences) > budget:
            return []
        return [ScheduledChunk(group, sequence, 1, True) for sequence in group.sequences]

    def _last_tokens_within(self, decoding: list[SequenceGroup], budget: int) -> list[ScheduledChunk]:
        """The last tokens of as many decoding groups as the budget suffices for; all have their slots."""
        chunks = [ScheduledChunk(group, sequence, 1, True) for group in decoding for sequence in group.sequences]
        if len(chunks) > budget:
            chunks = []
            for group in decoding:
                chunks += self._last_tokens_of(group, budget - len(chunks))
        return chunks

    def _last_tokens_with_preemption(self, decoding: list[SequenceGroup], budget: int) -> list[ScheduledChunk]:
        """The same if blocks do not suffice for all: groups are preempted until the rest have their slots."""
        chunks: list[ScheduledChunk] = []
        # In this order, no group is preempted that this step has scheduled already. A prompt's blocks were all reserved when
        # it was admitted.
        running = self.shares.preempted_last_first(self.running, lambda group: group.num_blocks)
        waits_for_slots = set(decoding)
        for group in list(running):
            planned = self._last_tokens_of(group, budget - len(chunks)) if group in waits_for_slots else []
            # A group that is no longer running was preempted for one before it.
            if planned and group in self.running and self._reserve_or_preempt(planned, running):
                chunks += planned
        return chunks

    def _reserve_or_preempt(self, planned: list[ScheduledChunk], running: list[SequenceGroup]) -> bool:
        """Make the chunks' slots writable, preempting from the end of ``running``; False: it came to their own group."""
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

        If blocks run out, the group itself is preempted: a preempted group's tokens must be known, and those of other groups
        may be in flight.
        """
        if group.sequences[0].num_computed < group.num_shared_prefill_tokens:
            return
        self.blocks.fork_prefilled(group)
        if not all(self.blocks.reserve(sequence, sequence.num_pending) for sequence in group.sequences):
            self._preempt(group)

    def _preempt(self, group: SequenceGroup) -> None:
        self.shares.refund(group)
        group.num_computed_before = max(group.num_computed_before, group.sequences[0].num_computed)
        for sequence in group.sequences:
            if sequence.table is not None:
                self.blocks.close(sequence)
            sequence.num_computed = 0
        group.num_shared_prefill_tokens = 0
        group.prefill_token_ids = np.array(group.sequences[0].token_ids, dtype=np.int32)
        del self.running[group]
        self.admission.note_preempted()
        self._queue(group)
        self.num_preemptions += 1

    def _queue(self, group: SequenceGroup) -> None:
        self.waiting.add(group)
        self._note_waiting(group.request.tenant)
        if self._loads is not None:
            self._loads.expect(group)

    def _note_waiting(self, tenant: str) -> None:
        self.shares.set_waiting(tenant, self.waiting.num_seqs.get(tenant, 0))

    # -- prompts and admission -----------------------------------------------------------------------------------

    def _schedule_prompts(self, prompts: list[SequenceGroup], budget: int) -> list[ScheduledChunk]:
        """What fills the rest of the step: prompts in progress, in turn, then waiting groups.

        The first prompt that is too long for what is left reserves half of it, shorter ones behind it use the other half,
        and what they leave is the long one's again::

            |  decoding  |  long prompt: at least half of the rest  |  short ones: up to half  |

        So a short prompt never waits for the end of a long one, which takes at most twice as long in return. Finally, what
        would lengthen this step too much, of tenants that want more than their share, is left to later steps
        (`prompt_shares`).
        """
        self.admission.begin_step()
        plan = _PromptPlan(budget)
        long, reserved = None, 0
        # Without those that were preempted in this step: they may be admitted again below, with a chunk.
        prompts = [group for group in prompts if group in self.running]
        prompts.sort(key=lambda group: self.shares.counter(group.request.tenant))  # equal ones stay in order of rank
        for group in prompts:
            # More urgent requests do not wait for the end of a prompt in progress, nor do tenants that were served less.
            self._admit_waiting(plan, long is not None, group.request)
            if group.num_pending <= plan.budget:
                plan.add(self._chunks_of(group, plan.budget))
            elif long is None:
                long, reserved = group, plan.budget - plan.budget // 2
                plan.budget -= reserved
            else:
                self.admission.note_stalled(group, plan.budget)
        self._admit_waiting(plan, long is not None)
        if long is not None:
            plan.add(self._chunks_of(long, plan.budget + reserved))
        chunks = plan.chunks
        tenants = {chunk.group.request.tenant for chunk in chunks}
        if len(tenants) > 1:
            wanting_more = self.admission.wanting_more(tenants)
            chunks = bound_prompts(chunks, wanting_more, self.shares, self._max_num_batched_tokens // 16)
        if self._max_prompt_logit_rows is not None:
            chunks = bound_logit_rows(chunks, self._max_prompt_logit_rows)
        if self._branch_points is not None:
            chunks = self._branch_points.cut(chunks)
        return chunks

    def _admit_waiting(self, plan: _PromptPlan, whole_prompts: bool, before: Request | None = None) -> None:
        """Admit waiting groups, and add their prompts to the plan, while there is budget.

        Args:
            whole_prompts: only prompts that fit into the budget as a whole.
            before: as for `Admission.next_group`.
        """
        while plan.budget > 0 and self.waiting:
            group = self.admission.next_group(plan.budget if whole_prompts else None, before)
            if group is None:
                break
            self._start_admitted(group)
            plan.add(self._chunks_of(group, plan.budget))

    def _start_admitted(self, group: SequenceGroup) -> None:
        self.start(group)
        request = group.request
        self._note_waiting(request.tenant)
        self.shares.charge_prompt(request, group.num_pending - 1, group.num_computed_at_start)
        if request.num_cached_tokens is None:
            # For a resumed request, tokens of its answer may have been cached, too.
            request.num_cached_tokens = min(group.num_computed_at_start, request.num_prompt_tokens)
            request.metrics.clip_loaded_tokens(request.num_cached_tokens)
            request.metrics.scheduled_time = time.monotonic()
            if request.on_admitted is not None:
                request.on_admitted()
