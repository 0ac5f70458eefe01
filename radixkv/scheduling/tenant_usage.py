"""What each tenant's running groups have, and which of them are preempted so that another tenant gets its share."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from radixkv.scheduling.fair_shares import FairShares
from radixkv.scheduling.request import SequenceGroup


class TenantUsage:
    """Sequences and blocks in use by tenant, at one moment.

    Args:
        shares: the tenants' weights and counters.
        running: in order of rank.
        waiting: sequences that wait, by tenant.
        max_num_seqs: concurrent sequences of all tenants.
        num_blocks: blocks of all tenants.
        block_size: tokens per block.
        cached_stays: whether what a preempted group computed is not evicted soon.
        burst: service by which a tenant's counter may be ahead of others', and it still has a claim to its share.
    """

    def __init__(
        self,
        shares: FairShares,
        running: Collection[SequenceGroup],
        waiting: Mapping[str, int],
        max_num_seqs: int,
        num_blocks: int,
        block_size: int,
        cached_stays: bool,
        burst: int,
    ) -> None:
        self._shares = shares
        self._running = dict.fromkeys(running)
        self._max_num_seqs = max_num_seqs
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._min_progress = 1 if cached_stays else block_size
        self._burst = burst
        self._floor = min(map(shares.counter, waiting), default=0.0)
        self.num_seqs: Counter[str] = Counter()
        for group in running:
            self.num_seqs[group.request.tenant] += group.num_seqs
        self.active = {*self.num_seqs, *waiting}
        # What is admitted or preempted in this step does not change its tenant's demand.
        self._level = shares.level({tenant: self._demand(tenant, waiting) for tenant in self.active}, max_num_seqs)

    def add(self, group: SequenceGroup) -> None:
        """Count a group that runs from now on; it is not preempted for others."""
        self.num_seqs[group.request.tenant] += group.num_seqs

    def remove(self, groups: Collection[SequenceGroup]) -> None:
        """Count groups of ``running`` no longer."""
        for group in groups:
            self.num_seqs[group.request.tenant] -= group.num_seqs
            del self._running[group]

    def tenants_wanting_more(self, waiting: Mapping[str, int]) -> list[str]:
        """Those that have and want more sequences than an equal share of all, by weight."""
        return [
            tenant
            for tenant in self.active
            if self._demand(tenant, waiting) > self._shares.part(tenant, self.active, self._max_num_seqs)
        ]

    def exceeds_limit(self, group: SequenceGroup) -> bool:
        """Whether the group's tenant would run more sequences with it than it may.

        By itself, a group may: it was accepted when its tenant might run more.
        """
        tenant = group.request.tenant
        limit = self._shares.share(tenant).max_num_seqs
        running = self.num_seqs[tenant]
        return limit is not None and running > 0 and running + group.num_seqs > limit

    def within_part(self, group: SequenceGroup) -> bool:
        """Whether the group's tenant would run no more than its share of the sequences with it."""
        tenant = group.request.tenant
        return self.num_seqs[tenant] + group.num_seqs <= self._seqs_part(tenant)

    def may_hold_up_others(self, group: SequenceGroup) -> bool:
        """Whether other tenants have to wait for a group that does not fit and may no longer be passed.

        One whose tenant runs its share already holds up only what else that tenant wants. When what runs has ended, that
        tenant has nothing running, so no group, however large, waits for ever.
        """
        return self.num_seqs[group.request.tenant] == 0 or self.within_part(group)

    def has_claim(self, group: SequenceGroup) -> bool:
        """Whether the group comes before all of tenants that have their share already.

        Counters alone would have a tenant that asks twice in a row wait until those that always ask have caught up.
        """
        tenant = group.request.tenant
        ahead = self._shares.counter(tenant) - self._floor
        allowed = self._burst / self._shares.share(tenant).weight
        return ahead <= allowed and self.within_part(group) and not self.exceeds_limit(group)

    def victims_for_seqs(self, group: SequenceGroup, missing: int) -> list[SequenceGroup]:
        """The running groups to preempt so that ``missing`` more sequences can run for ``group``; none if not so many."""
        if not self.has_claim(group):
            return []
        victims = []
        used = Counter(self.num_seqs)
        for victim in self._candidates(group, lambda group: group.num_seqs):
            if missing > 0 and used[victim.request.tenant] > self._seqs_part(victim.request.tenant):
                used[victim.request.tenant] -= victim.num_seqs
                missing -= victim.num_seqs
                victims.append(victim)
        return [] if missing > 0 else victims

    def victims_for_blocks(self, group: SequenceGroup) -> list[SequenceGroup]:
        """The running group to preempt because ``group`` lacks blocks; none if its tenant would have more than its share.

        One at a time: how many of a victim's blocks are its own is seen only when it is gone.
        """
        if not self.has_claim(group):
            return []
        used: Counter[str] = Counter()
        for running in self._running:
            used[running.request.tenant] += running.num_blocks
        needed = used[group.request.tenant] + -(-(len(group.prompt) + 1) // self._block_size)
        if needed > self._blocks_part(group.request.tenant):
            return []
        candidates = self._candidates(group, lambda group: group.num_blocks)
        over = (
            victim for victim in candidates if used[victim.request.tenant] > self._blocks_part(victim.request.tenant)
        )
        return list(itertools.islice(over, 1))

    def _candidates(self, group: SequenceGroup, size: Callable[[SequenceGroup], int]) -> list[SequenceGroup]:
        """Groups of other tenants that may be preempted for ``group``, first those of the tenant with most.

        Each has computed nothing yet or, where it may be evicted, at least a block since it was started: so preemption costs
        no more than half of the steps, even where everything is evicted before the group resumes.
        """
        return [
            victim
            for victim in reversed(self._shares.preempted_last_first(self._running, size))
            if victim.request.tenant != group.request.tenant
            and not 0 < victim.sequences[0].num_computed - victim.num_computed_at_start < self._min_progress
        ]

    def _demand(self, tenant: str, waiting: Mapping[str, int]) -> int:
        """Sequences that the tenant runs and wants to run."""
        wanted = self.num_seqs[tenant] + waiting.get(tenant, 0)
        limit = self._shares.share(tenant).max_num_seqs
        return wanted if limit is None else min(wanted, limit)

    def _seqs_part(self, tenant: str) -> int:
        return max(1, int(min(self._level * self._shares.share(tenant).weight, self._max_num_seqs)))

    def _blocks_part(self, tenant: str) -> int:
        return self._shares.part(tenant, self.active, self._num_blocks)
