"""What each tenant's running groups have: who comes first, and which groups are preempted so that it gets its share."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property

from radixkv.cache import PrefixCache
from radixkv.scheduling.fair_shares import FairShares, Turn, WaitsFor, whole_share
from radixkv.scheduling.request import Request, SequenceGroup
from radixkv.scheduling.waiting_queue import WaitingQueue


class TenantUsage:
    """Sequences and blocks in use by tenant, at one moment.

    Args:
        running: in order of rank.
        burst: service by which a tenant's counter may be ahead of others' without losing the claim to its share.
    """

    def __init__(
        self,
        shares: FairShares,
        running: Collection[SequenceGroup],
        waiting: WaitingQueue,
        cache: PrefixCache,
        max_num_seqs: int,
        burst: int,
    ) -> None:
        self._shares = shares
        self._waiting = waiting
        self._running = dict.fromkeys(running)
        self._max_num_seqs = max_num_seqs
        self._num_blocks = cache.num_blocks
        self._block_size = cache.block_size
        # What was used last is evicted last, so what a preempted group computed stays if half of all blocks are available.
        cached_stays = 2 * cache.num_available_blocks >= cache.num_blocks
        self._min_progress = 1 if cached_stays else cache.block_size
        self._burst = burst
        # The smallest counter of the tenants that wait, and how small it may become before added groups lose their claims.
        self._floor = shares.floor
        self._lowest_floor = -math.inf
        # What added groups will be charged later, and the running tenants' counters less refunds for removed groups.
        self._uncharged: defaultdict[str, float] = defaultdict(float)
        self._counters = {group.request.tenant: shares.counter(group.request.tenant) for group in running}
        self.num_seqs: Counter[str] = Counter()
        for group in running:
            self.num_seqs[group.request.tenant] += group.num_seqs
        # Sequences that each tenant runs or waits for. What is admitted or preempted in this step does not change them.
        self._wanted = Counter(waiting.num_seqs)
        self._wanted.update(self.num_seqs)
        # No waiting tenant up to this one, in turn, has a claim.
        self._last_without_claim: Turn | None = None

    def add(self, group: SequenceGroup, uncharged: float = 0.0) -> None:
        """Count a group that runs from now on. No group is then preempted whose waiting would void this one's claim.

        Args:
            uncharged: the service that its tenant will be charged when the group starts; 0 if it has been charged.
        """
        tenant = group.request.tenant
        self.num_seqs[tenant] += group.num_seqs
        self._lowest_floor = max(self._lowest_floor, self._lowest_floor_of(tenant))
        self._uncharged[tenant] += uncharged
        # Where nothing is charged for the group, its tenant may come before some that have no claim.
        if len(group.prefill_token_ids) == 1:
            self._last_without_claim = None

    def remove(self, groups: Collection[SequenceGroup]) -> None:
        """Count groups of ``running`` no longer: from now on, their tenants wait."""
        for group in groups:
            tenant = group.request.tenant
            self.num_seqs[tenant] -= group.num_seqs
            self._counters[tenant] -= self._shares.unused(group)
            self._floor = min(self._floor, self._counters[tenant])
            del self._running[group]
        self._last_without_claim = None

    def look_again(self) -> None:
        """Tenants are in turn again that were not."""
        self._last_without_claim = None

    def claimants(self, *waiting_for: WaitsFor) -> Iterator[str]:
        """The tenants below their share, in turn, of those that wait for one of these.

        Whether one is below its share is found out only when it is its turn: of many that wait, few are served in a step. One
        that has no claim gets none while groups are only added, and is not looked at again.
        """
        is_first = True
        for turn in self._shares.in_turn(*waiting_for, after=self._last_without_claim):
            if self.has_claim(self._waiting.first(turn.tenant)):
                is_first = False
                yield turn.tenant
            elif is_first:
                self._last_without_claim = turn

    def in_turn(self) -> Iterator[str]:
        """Those of which something might start: first the tenants below their share, then by the service they received."""
        claimants = set()
        for tenant in self.claimants(WaitsFor.TURN):
            claimants.add(tenant)
            yield tenant
        yield from (turn.tenant for turn in self._shares.in_turn(WaitsFor.TURN) if turn.tenant not in claimants)

    def may_come_before(self, tenant: str, request: Request | None) -> bool:
        """Whether groups of a waiting tenant may come before a request whose prompt is in progress, if there is one."""
        if request is None:
            return True
        if tenant == request.tenant:
            return self._waiting.first(tenant).request.priority < request.priority
        if self._shares.counter(tenant) < self._shares.counter(request.tenant):
            return True
        return self.has_claim(self._waiting.first(tenant))

    def wanting_more(self, tenants: Iterable[str]) -> set[str]:
        """Those whose running and waiting sequences together exceeded an equal share of all, by weight, at that moment."""
        return {
            tenant
            for tenant in tenants
            if self._demands[tenant] > self._shares.apportion(tenant, self._max_num_seqs, self._total_weight)
        }

    def exceeds_limit(self, group: SequenceGroup) -> bool:
        """Whether the group's tenant would run more sequences with it than it may.

        A group that runs alone may exceed the limit: it was accepted when its tenant was allowed more.
        """
        tenant = group.request.tenant
        limit = self._shares.share(tenant).max_num_seqs
        running = self.num_seqs[tenant]
        return limit is not None and running > 0 and running + group.num_seqs > limit

    def may_hold_up_others(self, group: SequenceGroup) -> bool:
        """Whether other tenants have to wait for a group that does not fit and may no longer be passed.

        A group whose tenant already runs its share holds up only that tenant's other waiting groups. Once the running ones
        have ended, the tenant has nothing running, so no group, however large, waits for ever.
        """
        return self.num_seqs[group.request.tenant] == 0 or self._within_share(group)

    def has_claim(self, group: SequenceGroup) -> bool:
        """Whether the group comes before all groups of tenants that already have their share.

        By counters alone, a tenant with two requests in a row would wait until those that always have some have caught up.
        """
        in_turn = self._lowest_floor_of(group.request.tenant) <= self._floor
        return in_turn and self._within_share(group) and not self.exceeds_limit(group)

    def exceeds_shares(self) -> bool:
        """Whether any tenant runs more sequences than its share."""
        return any(self._exceeds_share(tenant, num_seqs) for tenant, num_seqs in self.num_seqs.items())

    def victims_for_seqs(self, group: SequenceGroup, missing: int) -> list[SequenceGroup]:
        """The running groups to preempt so that ``missing`` more sequences of ``group`` can run; none if they are too few.

        The group has a claim (`has_claim`).
        """
        victims = []
        used, counters = Counter(self.num_seqs), dict(self._counters)
        above = {tenant for tenant, num_seqs in used.items() if self._exceeds_share(tenant, num_seqs)}
        for victim in self._candidates(above, lambda group: group.num_seqs):
            tenant = victim.request.tenant
            if missing <= 0:
                break
            if self._exceeds_share(tenant, used[tenant]) and self._claims_hold(group, counters[tenant], victim):
                used[tenant] -= victim.num_seqs
                counters[tenant] -= self._shares.unused(victim)
                missing -= victim.num_seqs
                victims.append(victim)
        return [] if missing > 0 else victims

    def victims_for_blocks(self, group: SequenceGroup) -> list[SequenceGroup]:
        """The running group to preempt because ``group`` lacks blocks; none if its tenant would have more than its share.

        The group has a claim. One at a time: how many blocks a victim shares with others is seen only once it is gone.
        """
        used: Counter[str] = Counter()
        for running in self._running:
            used[running.request.tenant] += running.num_blocks
        needed = used[group.request.tenant] + -(-(len(group.prefill_token_ids) + 1) // self._block_size)
        if needed > self._share_of_blocks(group.request.tenant):
            return []
        above = {tenant for tenant, num_blocks in used.items() if num_blocks > self._share_of_blocks(tenant)}
        for victim in self._candidates(above, lambda group: group.num_blocks):
            if self._claims_hold(group, self._counters[victim.request.tenant], victim):
                return [victim]
        return []

    def _within_share(self, group: SequenceGroup) -> bool:
        """Whether the group's tenant would run no more than its share of the sequences with it."""
        tenant = group.request.tenant
        return not self._exceeds_share(tenant, self.num_seqs[tenant] + group.num_seqs)

    def _exceeds_share(self, tenant: str, num_seqs: int) -> bool:
        """Whether so many sequences are more than the tenant's share, which is never less than 1."""
        if num_seqs <= 1:
            return False  # without computing the level, which takes time for each tenant that waits
        return num_seqs > whole_share(min(self._level * self._shares.share(tenant).weight, self._max_num_seqs))

    def _candidates(self, above: Collection[str], size: Callable[[SequenceGroup], int]) -> list[SequenceGroup]:
        """Groups that may be preempted, of the tenants above their shares; first those of the tenant with the most.

        Since it started, each has computed either nothing or enough: twice what earlier preemptions made it compute again
        and, where its results may be evicted, at least a block. So each preemption but the last is paid for by as many new
        tokens: however often a group is preempted, that costs no more than twice its own tokens, even if nothing ever stays
        in the cache.
        """
        running = [group for group in self._running if group.request.tenant in above]
        return [
            victim
            for victim in reversed(self._shares.preempted_last_first(running, size))
            if self._has_progressed(victim)
        ]

    def _has_progressed(self, group: SequenceGroup) -> bool:
        num_computed = group.sequences[0].num_computed - group.num_computed_at_start
        num_lost = group.num_computed_before - group.num_computed_at_start
        return num_computed == 0 or num_computed >= max(self._min_progress, 2 * num_lost)

    def _claims_hold(self, group: SequenceGroup, counter: float, victim: SequenceGroup) -> bool:
        """Whether ``group`` and added groups keep their claims once the victim, whose tenant has this counter, waits."""
        lowest = max(self._lowest_floor, self._lowest_floor_of(group.request.tenant))
        return lowest <= counter - self._shares.unused(victim)

    def _lowest_floor_of(self, tenant: str) -> float:
        """The smallest counter that others may have while the tenant still has a claim to its share."""
        counter = self._shares.counter(tenant) + self._uncharged[tenant]
        return counter - self._burst / self._shares.share(tenant).weight

    @cached_property
    def _demands(self) -> dict[str, int]:
        """Sequences that each tenant runs and wants to run."""
        return self._shares.within_limits(self._wanted)

    @cached_property
    def _level(self) -> float:
        """How many sequences a tenant of weight 1 may run."""
        return self._shares.level(self._demands, self._max_num_seqs)

    @cached_property
    def _total_weight(self) -> float:
        return self._shares.total_weight(self._wanted)

    def _share_of_blocks(self, tenant: str) -> int:
        return self._shares.apportion(tenant, self._num_blocks, self._total_weight)
