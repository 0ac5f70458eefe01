"""Who waits, and who is let in next.

The line is ordered by priority (lower first, as in vLLM), within it preempted groups before new ones, within these by
arrival. Of the new ones, the one with the most of its prompt cached goes first: it costs least, and what it reuses
cannot be evicted any more (longest prefix match, SGLang, Zheng et al. 2024). Taken alone that rule starves whoever brings
a cold prompt, so how far it may bend the line is bounded::

    line        A   B   C   D   E   F | G   H ...        the oldest `window` compete; the rest is not looked at
    cached      0  64   0 512  64   0
    overtaken   2   1   1   0   0   0                    D is let in next: A, B and C are overtaken once more

A group is overtaken when a new one from behind it in this line is let in first. Those who compete are always the first
few of the line, up to and including the first that has been overtaken `max_overtaken` times; so nobody from behind that
one is let in before it any more, and **no group is ever overtaken by more than `max_overtaken` others**, whatever arrives.
This holds too for a group that waits for a prefix which another one is just computing, and lets others go first.

Between priorities the order is strict: as long as more urgent requests keep coming, less urgent ones wait.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from sortedcontainers import SortedDict

from radixkv.cache import PrefixCache
from radixkv.scheduling.request import Request, SequenceGroup

# (priority, 0 preempted or 1 new, arrival, sample): the order of the line.
_Place = tuple[int, int, int, int]


@dataclass(eq=False, slots=True)
class _Waiting:
    group: SequenceGroup
    num_cached: int = 0  # tokens of its prompt that were known at the last look-up; 0 for a preempted group
    num_overtaken: int = 0
    looked_up_at: int = -1  # the tree's version then


class WaitingQueue:
    """The groups that wait, in line.

    Looking up how much of a prompt is cached is bounded work: the first `window` of the line at most, once a step at most,
    only in steps in which somebody could be let in, and only when the tree has changed since. Thirty-two look-ups of
    prompts of 4k tokens take about 0.1 ms.

    Args:
        cache: where prompts are looked up.
        window: how many of the line compete by what is cached.
        max_overtaken: how often one of them can be overtaken.
    """

    def __init__(self, cache: PrefixCache, window: int = 32, max_overtaken: int = 32) -> None:
        self._cache = cache
        self._window = window
        self._max_overtaken = max_overtaken
        self._line: SortedDict[_Place, _Waiting] = SortedDict()

    def __len__(self) -> int:
        return len(self._line)

    def __iter__(self) -> Iterator[SequenceGroup]:
        return (waiting.group for waiting in self._line.values())

    def __contains__(self, group: SequenceGroup) -> bool:
        return _place(group) in self._line

    @property
    def most_urgent(self) -> int:
        """The priority of the first in line, which is not empty."""
        return int(self._line.peekitem(0)[0][0])

    def add(self, group: SequenceGroup) -> None:
        """Let a group stand in line: a new one, or one that was preempted."""
        self._line[_place(group)] = _Waiting(group)

    def remove(self, group: SequenceGroup) -> None:
        """A group leaves the line without being let in."""
        del self._line[_place(group)]

    def groups_of(self, request: Request) -> list[SequenceGroup]:
        """The request's groups that wait."""
        found = []
        for new in (0, 1):
            first = (request.priority, new, request.arrival)
            found += [self._line[place].group for place in self._line.irange((*first, -1), (*first, request.num_slots))]
        return found

    def may_go_before(self, group: SequenceGroup) -> bool:
        """Whether it is somebody else's turn by now than that of ``group``, which waits too."""
        first, place = self._line.peekitem(0)[0], _place(group)
        return bool(first[:2] < place[:2] or (group.started and first < place))

    def candidates(self, look_up: bool) -> list[SequenceGroup]:
        """Those who may be let in now, best first.

        Args:
            look_up: find out what is cached of their prompts, if that may have changed.
        """
        compete: list[tuple[_Place, _Waiting]] = []
        for place, waiting in itertools.islice(self._line.items(), self._window):
            compete.append((place, waiting))
            if waiting.num_overtaken >= self._max_overtaken:
                break
        if look_up:
            self._look_up([waiting for _, waiting in compete])
        compete.sort(key=lambda item: (item[0][:2], -item[1].num_cached, item[0]))
        return [waiting.group for _, waiting in compete]

    def num_uncached(self, group: SequenceGroup) -> int:
        """Tokens of the group's prompt that were not known when it was last looked up."""
        waiting: _Waiting = self._line[_place(group)]
        return len(group.prompt) - waiting.num_cached

    def admit(self, group: SequenceGroup) -> None:
        """``group`` is let in: it leaves the line, and those before it are overtaken."""
        admitted = _place(group)
        del self._line[admitted]
        if group.started:
            return
        for place in self._line.irange(maximum=admitted):
            self._line[place].num_overtaken += 1

    def _look_up(self, compete: list[_Waiting]) -> None:
        version = self._cache.version
        for waiting in compete:
            group, request = waiting.group, waiting.group.request
            if waiting.looked_up_at != version and request.read_cache and not group.started:
                waiting.num_cached = self._cache.match(group.prompt, request.namespace)
                waiting.looked_up_at = version


def _place(group: SequenceGroup) -> _Place:
    priority, arrival, sample = group.rank
    return priority, int(not group.started), arrival, sample
