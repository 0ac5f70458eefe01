"""Which of a tenant's waiting groups is admitted next; `fair_shares` says which tenant is.

Each tenant has a queue, ordered by priority (lower first, as in vLLM), then preempted groups before new ones, then by
arrival. Of the new ones, the one with the most of its prompt cached is admitted first: it costs least, and what it
reuses can no longer be evicted (longest prefix match, SGLang, Zheng et al. 2024). That rule alone starves requests with cold
prompts, so how far it may reorder a queue is bounded::

    queue       A   B   C   D   E   F | G   H ...        the first `window` groups are candidates
    cached      0  64   0 512  64   0
    overtaken   2   1   1   0   0   0                    D is admitted next: A, B and C are overtaken once more

A group is overtaken when a new one from behind it in its queue is admitted first, or another tenant's although it was this
group's turn: because more is cached of the other, or because this one does not fit. The candidates are always the first few
of a queue, up to and including the first that has been overtaken `max_overtaken` times; so none from behind that one is
admitted before it, and **no group is ever overtaken by more than `max_overtaken` others of its tenant**, whatever arrives.
This holds too for a group that is skipped because its prefix is in flight.

Between priorities the order is strict: as long as more urgent requests of a tenant keep arriving, its less urgent ones wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from radixkv.cache import PrefixCache
from radixkv.scheduling.request import Request, SequenceGroup

# (priority, 0 if preempted or 1 if new, arrival, sample): the order of the queue.
_Key = tuple[int, int, int, int]


@dataclass(eq=False, slots=True)
class _Entry:
    group: SequenceGroup
    num_seqs: int
    num_uncached: int  # tokens of its prompt that were not cached at the last look-up
    num_cached: int = 0  # those that were cached, and let it overtake others; 0 for a preempted group
    num_overtaken: int = 0
    looked_up_at: int = -1  # the tree's version then


class WaitingQueue:
    """The waiting groups, in order, by tenant.

    Looking up how much of a prompt is cached is bounded work: once when it is queued, and then for the first `window` groups
    of a tenant at most, once per step at most, only in steps in which one could be admitted, and only if the tree has changed
    since. Thirty-two look-ups of prompts of 4k tokens take about 0.1 ms.

    Args:
        window: how many groups of a tenant are candidates for admission, and how many tenants may be passed because their
            groups do not fit or, where others would be preempted, wait for loads.
        max_overtaken: how often a group can be overtaken.

    Attributes:
        num_seqs: sequences that wait, by tenant.
        num_uncached_tokens: of all groups' prompts, those that were not cached when they were looked up last.
    """

    def __init__(self, cache: PrefixCache, window: int = 32, max_overtaken: int = 32) -> None:
        self._cache = cache
        self.window = window
        self._max_overtaken = max_overtaken
        self._queues: dict[str, SortedDict[_Key, _Entry]] = {}
        self.num_seqs: dict[str, int] = {}
        self.num_uncached_tokens = 0

    def __len__(self) -> int:
        return sum(map(len, self._queues.values()))

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (entry.group for queue in self._queues.values() for entry in queue.values())

    @property
    def tenants(self) -> Collection[str]:
        """Those that have a waiting group."""
        return self._queues.keys()

    def first(self, tenant: str) -> SequenceGroup:
        """The first group of a tenant that waits."""
        entry: _Entry = self._queues[tenant].peekitem(0)[1]
        return entry.group

    def groups(self, tenant: str) -> Iterator[SequenceGroup]:
        """The groups of a tenant that waits, in order of its queue."""
        return (entry.group for entry in self._queues[tenant].values())

    def add(self, group: SequenceGroup) -> None:
        """Queue a new or a preempted group."""
        tenant, num_seqs = group.request.tenant, group.num_seqs
        entry = self._queues.setdefault(tenant, SortedDict())[_key(group)] = _Entry(
            group, num_seqs, len(group.prefill_token_ids)
        )
        self.num_seqs[tenant] = self.num_seqs.get(tenant, 0) + num_seqs
        self.num_uncached_tokens += entry.num_uncached
        self._look_up(entry)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without admitting it."""
        tenant = group.request.tenant
        queue = self._queues[tenant]
        entry: _Entry = queue.pop(_key(group))
        self.num_seqs[tenant] -= entry.num_seqs
        self.num_uncached_tokens -= entry.num_uncached
        if not queue:
            del self._queues[tenant], self.num_seqs[tenant]

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        """The request's waiting groups."""
        found = []
        queue = self._queues.get(request.tenant, SortedDict())
        for new in (0, 1):
            first = (request.priority, new, request.arrival)
            found += [queue[key].group for key in queue.irange((*first, -1), (*first, request.num_seqs))]
        # A request that ended elsewhere was never queued, and has no time of arrival of its own.
        return [group for group in found if group.request is request]

    def candidates(self, tenant: str, look_up: bool) -> list[SequenceGroup]:
        """The groups of a waiting tenant that may be admitted now, best first.

        Args:
            look_up: update how much of their prompts is cached, if that may have changed.
        """
        candidates: list[tuple[_Key, _Entry]] = []
        for key, entry in itertools.islice(self._queues[tenant].items(), self.window):
            candidates.append((key, entry))
            if entry.num_overtaken >= self._max_overtaken:
                break
        if look_up:
            for _, entry in candidates:
                self._look_up(entry)
        candidates.sort(key=lambda item: (item[0][:2], -item[1].num_cached, item[0]))
        return [entry.group for _, entry in candidates]

    def num_uncached(self, group: SequenceGroup, look_up: bool = False) -> int:
        """Tokens of the group's prompt that were not cached when it was last looked up.

        Args:
            look_up: look it up now, if the tree has changed since.
        """
        entry = self._entry(group)
        if look_up:
            self._look_up(entry)
        return entry.num_uncached

    def may_be_passed(self, group: SequenceGroup) -> bool:
        """Whether others may overtake a group that does not fit: only a new one, ``max_overtaken`` times at most."""
        return not group.started and self._entry(group).num_overtaken < self._max_overtaken

    def pass_over(self, group: SequenceGroup) -> None:
        """Another tenant's group is admitted although it was this group's turn."""
        self._entry(group).num_overtaken += 1

    def admit(self, group: SequenceGroup) -> None:
        """Remove ``group`` because it is admitted; a new one overtakes those before it."""
        queue, admitted = self._queues[group.request.tenant], _key(group)
        self.remove(group)
        if group.started:
            return
        for key in queue.irange(maximum=admitted):
            queue[key].num_overtaken += 1

    def _entry(self, group: SequenceGroup) -> _Entry:
        entry: _Entry = self._queues[group.request.tenant][_key(group)]
        return entry

    def _look_up(self, entry: _Entry) -> None:
        version, group, request = self._cache.version, entry.group, entry.group.request
        if entry.looked_up_at == version or not request.reuses_prefixes:
            return
        num_cached = self._cache.match(group.prefill_token_ids, request.namespace)
        entry.looked_up_at = version
        entry.num_cached = 0 if group.started else num_cached
        self.num_uncached_tokens -= entry.num_uncached
        entry.num_uncached = max(1, len(group.prefill_token_ids) - num_cached)  # the last token is always computed
        self.num_uncached_tokens += entry.num_uncached


def _key(group: SequenceGroup) -> _Key:
    priority, arrival, sample = group.rank
    return priority, int(not group.started), arrival, sample
