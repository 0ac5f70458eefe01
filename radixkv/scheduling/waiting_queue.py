"""Which waiting group is admitted next.

The queue is ordered by priority (lower first, as in vLLM), within that preempted groups before new ones, within these by
arrival. Of the new ones, the one with the most of its prompt cached is admitted first: it costs least, and what it reuses
can no longer be evicted (longest prefix match, SGLang, Zheng et al. 2024). That rule alone starves requests with cold
prompts, so how far it may reorder the queue is bounded::

    queue       A   B   C   D   E   F | G   H ...        the first `window` groups are candidates
    cached      0  64   0 512  64   0
    overtaken   2   1   1   0   0   0                    D is admitted next: A, B and C are overtaken once more

A group is overtaken when a new one from behind it in this queue is admitted first. The candidates are always the first few
of the queue, up to and including the first that has been overtaken `max_overtaken` times; so none from behind that one is
admitted before it, and **no group is ever overtaken by more than `max_overtaken` others**, whatever arrives. This holds too
for a group that is skipped because its prefix is in flight.

Between priorities the order is strict: as long as more urgent requests keep arriving, less urgent ones wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from radixkv.cache import PrefixCache
from radixkv.scheduling.request import Request, SequenceGroup

# (priority, 0 if preempted or 1 if new, arrival, sample): the order of the queue.
_Key = tuple[int, int, int, int]


@dataclass(eq=False, slots=True)
class _Entry:
    group: SequenceGroup
    num_cached: int = 0  # tokens of its prompt that were cached at the last look-up; 0 for a preempted group
    num_overtaken: int = 0
    looked_up_at: int = -1  # the tree's version then


class WaitingQueue:
    """The waiting groups, in order.

    Looking up how much of a prompt is cached is bounded work: for the first `window` groups at most, once per step at most,
    only in steps in which one could be admitted, and only if the tree has changed since. Thirty-two look-ups of prompts of
    4k tokens take about 0.1 ms.

    Args:
        cache: where prompts are looked up.
        window: how many groups are candidates for admission.
        max_overtaken: how often a group can be overtaken.
    """

    def __init__(self, cache: PrefixCache, window: int = 32, max_overtaken: int = 32) -> None:
        self._cache = cache
        self._window = window
        self._max_overtaken = max_overtaken
        self._queue: SortedDict[_Key, _Entry] = SortedDict()

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (entry.group for entry in self._queue.values())

    def __contains__(self, group: SequenceGroup) -> bool:
        return _key(group) in self._queue

    @property
    def most_urgent(self) -> int:
        """The priority of the first group; the queue must not be empty."""
        return int(self._queue.peekitem(0)[0][0])

    def add(self, group: SequenceGroup) -> None:
        """Queue a new or a preempted group."""
        self._queue[_key(group)] = _Entry(group)

    def remove(self, group: SequenceGroup) -> None:
        """Remove a group without admitting it."""
        del self._queue[_key(group)]

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        """The request's waiting groups."""
        found = []
        for new in (0, 1):
            first = (request.priority, new, request.arrival)
            found += [self._queue[key].group for key in self._queue.irange((*first, -1), (*first, request.num_seqs))]
        return found

    def is_preceded(self, group: SequenceGroup) -> bool:
        """Whether another group must be admitted before ``group``, which is queued too."""
        first, key = self._queue.peekitem(0)[0], _key(group)
        return bool(first[:2] < key[:2] or (group.started and first < key))

    def candidates(self, look_up: bool) -> list[SequenceGroup]:
        """The groups that may be admitted now, best first.

        Args:
            look_up: update how much of their prompts is cached, if that may have changed.
        """
        candidates: list[tuple[_Key, _Entry]] = []
        for key, entry in itertools.islice(self._queue.items(), self._window):
            candidates.append((key, entry))
            if entry.num_overtaken >= self._max_overtaken:
                break
        if look_up:
            self._look_up([entry for _, entry in candidates])
        candidates.sort(key=lambda item: (item[0][:2], -item[1].num_cached, item[0]))
        return [entry.group for _, entry in candidates]

    def num_uncached(self, group: SequenceGroup) -> int:
        """Tokens of the group's prompt that were not cached when it was last looked up."""
        entry: _Entry = self._queue[_key(group)]
        return len(group.prompt) - entry.num_cached

    def admit(self, group: SequenceGroup) -> None:
        """Remove ``group`` because it is admitted; a new one overtakes those before it."""
        admitted = _key(group)
        del self._queue[admitted]
        if group.started:
            return
        for key in self._queue.irange(maximum=admitted):
            self._queue[key].num_overtaken += 1

    def _look_up(self, entries: list[_Entry]) -> None:
        version = self._cache.version
        for entry in entries:
            group, request = entry.group, entry.group.request
            if entry.looked_up_at != version and request.read_cache and not group.started:
                entry.num_cached = self._cache.match(group.prompt, request.namespace)
                entry.looked_up_at = version


def _key(group: SequenceGroup) -> _Key:
    priority, arrival, sample = group.rank
    return priority, int(not group.started), arrival, sample
